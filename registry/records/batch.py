"""Files that clients store, and batches: files of calls that run as jobs, some lines at a time."""

from enum import StrEnum

import msgspec

from registry.records.job import HookStatus


class FilePurpose(StrEnum):
    """What a file is for."""

    BATCH = "batch"  # the calls of a batch
    BATCH_OUTPUT = "batch_output"  # its results, or its errors
    USER_DATA = "user_data"


class FilePart(msgspec.Struct, frozen=True, kw_only=True):
    """A consecutive part of a file: a blob of the store."""

    digest: str
    size: int


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a tenant. Times are Unix seconds; after `expires_at` it is removed."""

    id: str
    tenant: str
    name: str
    purpose: FilePurpose
    created_at: float
    expires_at: float
    parts: tuple[FilePart, ...]

    @property
    def size(self) -> int:
        """The bytes of the file."""
        return sum(part.size for part in self.parts)


class BatchStatus(StrEnum):
    """The life of a batch."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"  # all lines have ended, its files are being written
    CANCELLING = "cancelling"  # no further line is started; those that run end
    COMPLETED = "completed"
    FAILED = "failed"  # its file is not valid
    EXPIRED = "expired"  # its time was over before all lines were run
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether nothing follows."""
        return not BATCH_TRANSITIONS[self]


BATCH_TRANSITIONS: dict[BatchStatus, frozenset[BatchStatus]] = {
    BatchStatus.VALIDATING: frozenset({BatchStatus.IN_PROGRESS, BatchStatus.FAILED, BatchStatus.CANCELLING}),
    BatchStatus.IN_PROGRESS: frozenset({BatchStatus.FINALIZING, BatchStatus.CANCELLING}),
    BatchStatus.FINALIZING: frozenset({BatchStatus.COMPLETED, BatchStatus.EXPIRED}),
    BatchStatus.CANCELLING: frozenset({BatchStatus.CANCELLED}),
    BatchStatus.COMPLETED: frozenset(),
    BatchStatus.FAILED: frozenset(),
    BatchStatus.EXPIRED: frozenset(),
    BatchStatus.CANCELLED: frozenset(),
}


class BatchFault(msgspec.Struct, frozen=True, kw_only=True):
    """Why a line of a batch's file is not valid; `line` is counted from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A batch of a tenant. Times are Unix seconds.

    `queued` lines of `total` have become jobs, those up to byte `offset` of the input. `flushed` of their
    results are in `output` and `errors`, parts of files; the others wait in the shared state. `webhook` is
    where its end is reported.
    """

    id: str
    tenant: str
    key_id: str
    endpoint: str
    input_file: str
    completion_window: str
    created_at: float
    expires_at: float
    status: BatchStatus = BatchStatus.VALIDATING
    metadata: dict[str, str] | None = None
    total: int = 0
    queued: int = 0
    offset: int = 0
    flushed: int = 0
    output: tuple[FilePart, ...] = ()
    errors: tuple[FilePart, ...] = ()
    output_file: str = ""
    error_file: str = ""
    faults: tuple[BatchFault, ...] = ()
    times: dict[str, float] = {}  # by status: when it was reached
    webhook: str = ""


class BatchCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What changes of a batch without its record: its lines that have ended, and its webhook.

    Results of `waiting` lines wait to be written. `hook` is how the delivery of its webhook stands.
    """

    completed: int = 0
    failed: int = 0
    waiting: int = 0
    waiting_bytes: int = 0
    hook: HookStatus | None = None

    @property
    def ended(self) -> int:
        """The lines that have ended."""
        return self.completed + self.failed
