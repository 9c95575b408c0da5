"""What follows from a job's response, and the next step of a batch: pure decisions."""

import msgspec
import pytest

from gateway.jobs.batch_steps import (
    WINDOW,
    Advance,
    CancelLines,
    FlushResults,
    QueueLines,
    Validate,
    Wait,
    next_step,
)
from gateway.jobs.outcomes import JobDelay, JobEnd, delay_s, next_of
from gateway.requests.job_call import JobReply
from registry.records.batch import BATCH_TRANSITIONS, BatchCounts, BatchRecord, BatchStatus
from registry.records.job import JobSpec, JobStatus

NOW = 1000.0
SPEC = JobSpec(
    id="j",
    request_id="r",
    name="j",
    tenant="t",
    key_id="k",
    path="/v1/completions",
    model="m",
    created_at=NOW,
    expires_at=NOW + 100,
)


@pytest.mark.parametrize(
    ("status", "code", "attempt", "expected"),
    [
        (200, "", 1, JobStatus.SUCCEEDED),
        (499, "cancelled", 1, JobStatus.CANCELLED),
        (400, "bad_request", 1, JobStatus.FAILED),
        (500, "function_error", 1, JobStatus.FAILED),
        (504, "timeout", 1, JobStatus.FAILED),
        (503, "overloaded", 1, None),
        (503, "no_nodes", 4, None),
        (503, "start_failed", 2, None),
        (503, "start_failed", 3, JobStatus.FAILED),
        (429, "rate_limit_exceeded", 1, None),
        (429, "insufficient_quota", 1, JobStatus.FAILED),
    ],
)
def test_what_follows_from_a_response(
    status: int, code: str, attempt: int, expected: JobStatus | None
) -> None:
    step = next_of(JobReply(status=status, body=b"", code=code), SPEC, attempt=attempt, now=NOW)
    if expected is None:
        assert isinstance(step, JobDelay) and step.seconds > 0
    else:
        assert isinstance(step, JobEnd) and step.status is expected


def test_delays_grow_are_bounded_and_do_not_outlast_the_job() -> None:
    assert [delay_s(attempt, None) for attempt in (1, 2, 3)] == [0.5, 1.0, 2.0]
    assert delay_s(1000, None) == 60.0 and delay_s(1, 120) == 120.0
    reply = JobReply(status=503, body=b"", code="overloaded", retry_after_s=10)
    assert isinstance(next_of(reply, SPEC, attempt=1, now=SPEC.expires_at - 5), JobEnd)


def record(
    status: BatchStatus = BatchStatus.IN_PROGRESS, *, total: int = 200, queued: int = 0
) -> BatchRecord:
    return BatchRecord(
        id="b",
        tenant="t",
        key_id="k",
        endpoint="/v1/completions",
        input_file="f",
        completion_window="24h",
        created_at=NOW,
        expires_at=NOW + 100,
        status=status,
        total=total,
        queued=queued,
    )


def ended(count: int, *, waiting: int = 0, waiting_bytes: int = 0) -> BatchCounts:
    return BatchCounts(completed=count, waiting=waiting, waiting_bytes=waiting_bytes)


def test_the_steps_of_a_batch() -> None:
    status = BatchStatus
    assert next_step(record(status.VALIDATING), ended(0), NOW) == Validate()
    assert next_step(record(), ended(0), NOW) == QueueLines(WINDOW)
    assert next_step(record(queued=64), ended(10), NOW) == Wait(100.0)
    assert next_step(record(queued=64), ended(40), NOW) == QueueLines(WINDOW - 24)
    assert isinstance(next_step(record(queued=64), ended(40, waiting=300), NOW), FlushResults)
    assert isinstance(
        next_step(record(queued=64), ended(40, waiting=2, waiting_bytes=2 << 20), NOW), FlushResults
    )
    assert next_step(record(queued=200), ended(199, waiting=5), NOW) == Wait(100.0)
    assert isinstance(next_step(record(queued=200), ended(200, waiting=5), NOW), FlushResults)
    assert next_step(record(queued=200), ended(200), NOW) == Advance(status.FINALIZING)
    assert next_step(record(status.FINALIZING, queued=200), ended(200), NOW) == Advance(status.COMPLETED)
    late = NOW + 100
    assert next_step(record(queued=64), ended(10), late) == CancelLines()
    assert next_step(record(queued=64), ended(64), late) == Advance(status.FINALIZING)
    assert next_step(record(status.FINALIZING, queued=64), ended(64), late) == Advance(status.EXPIRED)
    assert next_step(record(status.CANCELLING, queued=64), ended(10), NOW) == CancelLines()
    assert next_step(record(status.CANCELLING, queued=64), ended(64), NOW) == Advance(status.CANCELLED)


def test_a_batch_always_ends_by_its_table_with_no_more_jobs_at_once_than_its_window() -> None:
    """Played with lines that end one by one."""
    batch, done, waiting = record(BatchStatus.VALIDATING), 0, 0
    for _ in range(10_000):
        step = next_step(batch, ended(done, waiting=waiting), NOW)
        match step:
            case Validate():
                changed = {"status": BatchStatus.IN_PROGRESS}
            case QueueLines(lines):
                changed = {"queued": min(batch.total, batch.queued + lines)}
            case FlushResults(lines):
                waiting -= min(waiting, lines)
                changed = {}
            case Advance(status):
                assert status in BATCH_TRANSITIONS[batch.status]
                changed = {"status": status}
            case _:
                assert batch.queued > done, step
                done, waiting, changed = done + 1, waiting + 1, {}
        batch = msgspec.structs.replace(batch, **changed)
        assert batch.queued - done <= WINDOW
        if batch.status.is_final:
            break
    assert (batch.status, done, waiting) == (BatchStatus.COMPLETED, 200, 0)
