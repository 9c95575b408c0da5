"""The next step of a batch, from its record and the counts of its lines. Pure."""

from dataclasses import dataclass

from registry.records.batch import BatchCounts, BatchRecord, BatchStatus

WINDOW = 64  # lines that are jobs at once
_FLUSH_LINES, _FLUSH_BYTES = 256, 1 << 20  # results that wait, from which on they are written to a part
_MAX_WAITING_BYTES = 8 << 20  # of results, beyond which no line is queued


@dataclass(frozen=True, slots=True)
class Validate:
    """Check its file."""


@dataclass(frozen=True, slots=True)
class QueueLines:
    """Make jobs of so many lines, at most."""

    lines: int


@dataclass(frozen=True, slots=True)
class FlushResults:
    """Write results that wait to parts of its files."""

    lines: int


@dataclass(frozen=True, slots=True)
class CancelLines:
    """Cancel the jobs of its lines."""


@dataclass(frozen=True, slots=True)
class Advance:
    """Give it a status; a final one with its files."""

    status: BatchStatus


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do before one of its lines ends, or so many seconds are over."""

    seconds: float | None


BatchStep = Validate | QueueLines | FlushResults | CancelLines | Advance | Wait


def next_step(record: BatchRecord, counts: BatchCounts, now: float) -> BatchStep:
    """Return the step of an open batch at `now` (Unix seconds)."""
    if record.status is BatchStatus.VALIDATING:
        return Validate()
    running = record.queued - counts.ended
    is_cancelling = record.status is BatchStatus.CANCELLING
    is_late = now >= record.expires_at
    more = record.queued < record.total and record.status is BatchStatus.IN_PROGRESS and not is_late
    if counts.waiting and (
        counts.waiting_bytes >= _FLUSH_BYTES or counts.waiting >= _FLUSH_LINES or not (running or more)
    ):
        return FlushResults(_FLUSH_LINES)
    if more and running <= WINDOW // 2 and counts.waiting_bytes < _MAX_WAITING_BYTES:
        return QueueLines(WINDOW - running)
    if running:
        if is_cancelling or is_late:
            return CancelLines()
        return Wait(record.expires_at - now)
    if more:
        return Wait(record.expires_at - now)
    match record.status:
        case BatchStatus.CANCELLING:
            return Advance(BatchStatus.CANCELLED)
        case BatchStatus.FINALIZING:
            whole = record.queued >= record.total
            return Advance(BatchStatus.COMPLETED if whole else BatchStatus.EXPIRED)
        case _:
            return Advance(BatchStatus.FINALIZING)
