"""Jobs: calls that are queued, run later by any gateway, and kept with their result for a time.

A job that a gateway runs is fenced by the number of its attempt: what an earlier attempt reports is refused.
Its bill is stored together with its result and then written to the ledger, so that both are of one attempt
also if a gateway, a node or Redis is killed meanwhile.
"""

from dataclasses import dataclass
from enum import StrEnum

import msgspec

from registry.records.usage import RequestRecord


class JobStatus(StrEnum):
    """The life of a job."""

    QUEUED = "queued"  # waits for a gateway
    RUNNING = "running"  # a gateway runs it, under a lease
    BILLING = "billing"  # its result is stored, its bill is not in the ledger yet
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether nothing follows."""
        return not TRANSITIONS[self]


# A running job returns to the queue when its gateway dies, stops, or finds that it has to wait.
TRANSITIONS: dict[JobStatus, frozenset[JobStatus]] = {
    JobStatus.QUEUED: frozenset({JobStatus.RUNNING, JobStatus.CANCELLED}),
    JobStatus.RUNNING: frozenset(
        {JobStatus.QUEUED, JobStatus.BILLING, JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED}
    ),
    JobStatus.BILLING: frozenset({JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED}),
    JobStatus.SUCCEEDED: frozenset(),
    JobStatus.FAILED: frozenset(),
    JobStatus.CANCELLED: frozenset(),
}


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a job is; it never changes. Times are Unix seconds.

    `id` identifies it, `request_id` its bill. `name` is how its client names it. It calls the operation at
    `path` with the rights of the key. After `expires_at` it is not started any more. Lines of a batch have
    its id, their number in its file and the client's `custom_id`.
    """

    id: str
    request_id: str
    name: str
    tenant: str
    key_id: str
    path: str
    model: str
    created_at: float
    expires_at: float
    webhook: str = ""
    batch: str = ""
    line: int = 0
    custom_id: str = ""


class JobOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a job ended: the status of the response, and facts of the call. Times are Unix seconds."""

    status: JobStatus
    status_code: int = 0
    version: int = 0
    started_at: float = 0.0
    ended_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job as it is now; `result` is JSON, the body of the response or an error envelope.

    `hook` is how the delivery of its webhook stands.
    """

    spec: JobSpec
    body: bytes
    status: JobStatus
    attempt: int = 0
    started_at: float | None = None
    outcome: JobOutcome | None = None
    result: bytes = b""
    cancelling: bool = False
    hook: "HookStatus | None" = None


class HookStatus(StrEnum):
    """The delivery of a webhook."""

    WAITING = "waiting"  # for its job, or for the next try
    DELIVERED = "delivered"
    FAILED = "failed"  # given up


@dataclass(frozen=True, slots=True)
class JobLease:
    """The right of one attempt to run a job."""

    id: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedJob:
    """A job to run. With a `bill` it has run: only that remains to be written.

    `lost` counts the attempts whose gateway did not return.
    """

    spec: JobSpec
    body: bytes
    attempt: int
    lost: int = 0
    cancelling: bool = False
    bill: RequestRecord | None = None

    @property
    def lease(self) -> JobLease:
        return JobLease(self.spec.id, self.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobClaims:
    """The jobs that were claimed; `due_in_s` is when more may be due without an event, None for never."""

    jobs: tuple[ClaimedJob, ...]
    due_in_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRenewal:
    """Of some leases: which attempts have lost their job, and which are to be cancelled."""

    lost: tuple[JobLease, ...] = ()
    cancelling: tuple[JobLease, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobBounds:
    """Bounds on jobs that are kept, and on the bytes of their bodies and results; one tenant gets half."""

    jobs: int = 20_000
    job_bytes: int = 256 << 20


class Submission(StrEnum):
    """What became of a new job."""

    QUEUED = "queued"
    EXISTS = "exists"  # a job with this id
    FULL = "full"  # the bounds of all jobs are reached
    TENANT_FULL = "tenant-full"  # those of one tenant


class JobEventKind(StrEnum):
    """What happened to a job, or a batch."""

    QUEUED = "queued"
    CANCELLING = "cancelling"
    ENDED = "ended"
    HOOK = "hook"  # a webhook is due
    BATCH = "batch"  # a batch was created, cancelled, or one of its lines has ended


@dataclass(frozen=True, slots=True)
class JobEvent:
    """An event of the job with this id, or of the batch."""

    kind: JobEventKind
    id: str


class LineResult(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a batch that has ended; `result` is JSON, empty without a response."""

    spec: JobSpec
    outcome: JobOutcome
    result: msgspec.Raw = msgspec.Raw()
