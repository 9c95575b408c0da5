"""How a job goes on after its request: it ends, or has to wait. Pure."""

from dataclasses import dataclass

from gateway.core.errors import ApiError
from gateway.requests.job_call import JobReply, error_reply
from registry.records.job import JobSpec, JobStatus

CLIENT_GONE = 499
# What another try may change; but a start that fails again and again is an error of the function.
_PASSING = frozenset({429, 503})
_LASTING = frozenset({"insufficient_quota"})
_MAX_FAILED_STARTS = 3
_FIRST_DELAY_S, _MAX_DELAY_S = 0.5, 60.0


@dataclass(frozen=True, slots=True)
class JobEnd:
    """The end of a job, with the status and the body of the response."""

    status: JobStatus
    reply: JobReply


@dataclass(frozen=True, slots=True)
class JobDelay:
    """A job that is run again after a delay."""

    seconds: float


def next_of(reply: JobReply, spec: JobSpec, *, attempt: int, now: float) -> JobEnd | JobDelay:
    """Decide what follows from the response that an attempt got at `now` (Unix seconds)."""
    if reply.status == CLIENT_GONE:
        return cancelled()
    if 200 <= reply.status < 300:
        return JobEnd(JobStatus.SUCCEEDED, reply)
    if reply.status not in _PASSING or reply.code in _LASTING:
        return JobEnd(JobStatus.FAILED, reply)
    if reply.code == "start_failed" and attempt >= _MAX_FAILED_STARTS:
        return JobEnd(JobStatus.FAILED, reply)
    seconds = delay_s(attempt, reply.retry_after_s)
    if now + seconds >= spec.expires_at:
        return JobEnd(JobStatus.FAILED, reply)
    return JobDelay(seconds)


def delay_s(attempt: int, retry_after_s: int | None) -> float:
    """Return the delay before the next attempt: twice that of the one before, at least `retry_after_s`."""
    doubled = min(_FIRST_DELAY_S * 2.0 ** min(attempt - 1, 10), _MAX_DELAY_S)
    return max(doubled, float(retry_after_s or 0))


def cancelled() -> JobEnd:
    """Return the end of a job that its client cancelled."""
    return JobEnd(JobStatus.CANCELLED, JobReply(status=CLIENT_GONE, body=b"", code="cancelled"))


def failed(error: ApiError) -> JobEnd:
    """Return the end of a job that cannot be run."""
    return JobEnd(JobStatus.FAILED, error_reply(error))


def expired() -> JobEnd:
    """Return the end of a job of which the time was over."""
    return failed(ApiError(504, "expired", "the job expired before it could be run"))


def lost_too_often(times: int) -> JobEnd:
    """Return the end of a job whose gateways died or lost the shared state again and again."""
    message = f"{times} gateways that ran the job did not return"
    return failed(ApiError(500, "attempts_exhausted", message))
