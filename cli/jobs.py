"""Predictions and batches of the caller, by the gateway's interface."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from cli.client import Client, segment
from cli.errors import CliError, TimeoutExceeded
from cli.progress import note, waiting
from cli.values import age_of, duration

WAIT_S = 5  # of one request that waits for an end; between two lines of progress of a batch
_BATCH_ID = re.compile(r"batch_[0-9a-f]{24}")
_PREDICTION_ENDS = frozenset({"succeeded", "failed", "canceled"})
_BATCH_ENDS = frozenset({"completed", "failed", "expired", "cancelled"})

Record = Mapping[str, Any]


def is_batch(job_id: str) -> bool:
    """Return whether an id is that of a batch; others are of predictions."""
    return _BATCH_ID.fullmatch(job_id) is not None


def path_of(job_id: str) -> str:
    """Return the path of a prediction or a batch."""
    return f"/v1/batches/{job_id}" if is_batch(job_id) else f"/predictions/{segment(job_id)}"


def has_ended(job: Record) -> bool:
    """Return whether nothing follows."""
    return job["status"] in (_BATCH_ENDS if is_batch(job["id"]) else _PREDICTION_ENDS)


def listed(client: Client, limit: int) -> list[dict[str, Any]]:
    """Return the latest predictions and batches as rows of the same fields, the latest first."""
    predictions = client.json("GET", "/predictions", params={"limit": limit})["data"]
    batches = client.json("GET", "/v1/batches", params={"limit": limit})["data"]
    rows = [*map(row_of, predictions), *map(row_of, batches)]
    return sorted(rows, key=lambda row: row["created_at"], reverse=True)[:limit]


def row_of(job: Record) -> dict[str, Any]:
    """Return a prediction or a batch as a row. Times are Unix seconds; `done` of `total` are calls."""
    if is_batch(job["id"]):
        counts = job["request_counts"]
        ended = [job[f"{status}_at"] for status in _BATCH_ENDS]
        return {
            "id": job["id"],
            "kind": "batch",
            "calls": job["endpoint"],
            "status": job["status"],
            "done": counts["completed"] + counts["failed"],
            "failed": counts["failed"],
            "total": counts["total"],
            "created_at": job["created_at"],
            "started_at": job["in_progress_at"],
            "ended_at": next((at for at in ended if at is not None), None),
            "webhook_status": job["webhook_status"],
        }
    return {
        "id": job["id"],
        "kind": "prediction",
        "calls": job["model"],
        "status": job["status"],
        "done": int(job["completed_at"] is not None),
        "failed": int(job["status"] == "failed"),
        "total": 1,
        "created_at": _moment(job["created_at"]),
        "started_at": _moment(job["started_at"]),
        "ended_at": _moment(job["completed_at"]),
        "webhook_status": job["webhook_status"],
    }


def described(job: Record) -> Iterator[tuple[str, str]]:
    """Yield the labelled values of a prediction or a batch."""
    row = row_of(job)
    yield "ID", row["id"]
    yield "Status", row["status"]
    yield ("Endpoint" if row["kind"] == "batch" else "Function"), row["calls"]
    if row["kind"] == "batch":
        yield "Calls", progress(job)
    yield "Created", f"{age_of(row['created_at'])} ago"
    if row["ended_at"] is not None:
        since = row["created_at"] if row["started_at"] is None else row["started_at"]
        yield "Took", duration(round(max(0.0, row["ended_at"] - since), 1))
    if job.get("error"):
        yield "Error", job["error"]["message"]
    for fault in _faults(job):
        yield "Error", fault
    if job["webhook"]:
        yield "Webhook", f"{row['webhook_status']}: {job['webhook']}"
    if row["kind"] == "prediction":
        yield "Request", job["request_id"]


def progress(batch: Record) -> str:
    """Return how far a batch is."""
    counts = batch["request_counts"]
    done = counts["completed"] + counts["failed"]
    failed = f", {counts['failed']} failed" if counts["failed"] else ""
    return f"{done} of {counts['total']} ended{failed}"


def wait_for(client: Client, job: Record, timeout_s: float | None, now_s: Callable[[], float]) -> Record:
    """Return a prediction or batch once it has ended, with a line of progress meanwhile.

    Raises TimeoutExceeded after `timeout_s`. It runs on then, and after Ctrl-C, too.
    """
    until_s = None if timeout_s is None else now_s() + timeout_s
    with runs_on(job["id"]), waiting(lambda: f"{job['id']}: {state_of(job)}"):
        while not has_ended(job):
            left_s = WAIT_S if until_s is None else min(WAIT_S, until_s - now_s())
            if left_s <= 0:
                raise TimeoutExceeded(f"{job['id']} is {state_of(job)} after {timeout_s:g} s")
            headers = {"prefer": f"wait={max(1, round(left_s))}"}
            job = client.json("GET", path_of(job["id"]), headers=headers)
    return job


def state_of(job: Record) -> str:
    """Return the status of a prediction or batch in a few words."""
    status = str(job["status"]).replace("_", " ")
    return f"{status}, {progress(job)}" if is_batch(job["id"]) else status


@contextmanager
def runs_on(job_id: str) -> Iterator[None]:
    """Write how to look at a job later, if the block is interrupted or the wait is over."""
    try:
        yield
    except (KeyboardInterrupt, TimeoutExceeded):
        note(f"{job_id} runs on. See it with: hypercast jobs show {job_id}")
        raise


def check_succeeded(job: Record) -> None:
    """Raise the CliError of a prediction or batch that has not ended well."""
    if not has_ended(job):
        raise CliError(f"{job['id']} has not ended: it is {state_of(job)} (wait for it: hypercast jobs wait)")
    if job["status"] in ("succeeded", "completed"):
        return
    reason = (job.get("error") or {}).get("message", "")
    reason = reason or next(iter(_faults(job)), "")
    raise CliError(f"{job['id']} {job['status']}{': ' if reason else ''}{reason}")


def _faults(job: Record) -> list[str]:
    faults = (job.get("errors") or {}).get("data", ())
    return [
        fault["message"] if fault["line"] is None else f"line {fault['line']}: {fault['message']}"
        for fault in faults
    ]


def _moment(text: str | None) -> float | None:
    return None if text is None else datetime.fromisoformat(text).timestamp()
