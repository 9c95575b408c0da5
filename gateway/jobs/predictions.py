"""Predictions: jobs as their clients name and see them. Pure."""

import hashlib
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from gateway.schemas.jobs import Prediction, PredictionEntry, PredictionUrls
from registry.records.job import Job, JobStatus

_STATUS: dict[JobStatus, Literal["starting", "processing", "succeeded", "failed", "canceled"]] = {
    JobStatus.QUEUED: "starting",
    JobStatus.RUNNING: "processing",
    JobStatus.BILLING: "processing",
    JobStatus.SUCCEEDED: "succeeded",
    JobStatus.FAILED: "failed",
    JobStatus.CANCELLED: "canceled",
}


def prediction_job_id(tenant: str, name: str) -> str:
    """Return the id of a tenant's job: the same name of another tenant is another job."""
    return f"pred-{hashlib.blake2b(f'{tenant}/{name}'.encode(), digest_size=16).hexdigest()}"


def prediction_of(job: Job) -> Prediction:
    """Return what the client sees of a job."""
    entry = entry_of(job)
    is_good = job.status is JobStatus.SUCCEEDED and job.result
    return Prediction(
        input=msgspec.Raw(job.body),
        output=msgspec.Raw(job.result) if is_good else None,
        **{name: getattr(entry, name) for name in PredictionEntry.__struct_fields__},
    )


def entry_of(job: Job) -> PredictionEntry:
    """Return what a list has of a job: all but its input and output."""
    spec, outcome, status = job.spec, job.outcome, job.status
    ended = outcome if outcome is not None and status.is_final else None
    error: dict[str, Any] | None = None
    if ended is not None and job.result and status is not JobStatus.SUCCEEDED:
        error = msgspec.json.decode(job.result, type=dict[str, Any])["error"]
    metrics = {}
    if ended is not None:
        metrics["total_time"] = round(max(0.0, ended.ended_at - spec.created_at), 3)
        if ended.started_at:
            metrics["predict_time"] = round(max(0.0, ended.ended_at - ended.started_at), 3)
    return PredictionEntry(
        id=spec.name,
        model=spec.model,
        version=ended.version if ended is not None and ended.version else None,
        status=_STATUS[status],
        error=error,
        request_id=spec.request_id,
        created_at=iso_time(spec.created_at),
        started_at=None if job.started_at is None else iso_time(job.started_at),
        completed_at=None if ended is None else iso_time(ended.ended_at),
        webhook=spec.webhook or None,
        webhook_status=None if job.hook is None else job.hook.value,
        metrics=metrics,
        urls=PredictionUrls(get=f"/predictions/{spec.name}", cancel=f"/predictions/{spec.name}/cancel"),
    )


def iso_time(at: float) -> str:
    """Return a time in Unix seconds as ISO 8601 in UTC, with milliseconds."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%S}.{int(at * 1000) % 1000:03d}Z"
