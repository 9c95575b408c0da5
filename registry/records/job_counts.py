"""How many jobs and batches there are."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from registry.records.batch import BatchStatus
from registry.records.job import JobStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCounts:
    """Predictions, lines of batches and batches by status, those that have ended while they are kept.

    `oldest_queued_s` is the time since the submission of the oldest job that waits, None without any.
    """

    predictions: Mapping[JobStatus, int] = field(default_factory=dict)
    lines: Mapping[JobStatus, int] = field(default_factory=dict)
    batches: Mapping[BatchStatus, int] = field(default_factory=dict)
    oldest_queued_s: float | None = None
