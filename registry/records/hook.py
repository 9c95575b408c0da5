"""Webhooks to deliver: of predictions, and of batches."""

from dataclasses import dataclass

from registry.records.batch import BatchCounts, BatchRecord
from registry.records.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedBatch:
    """A batch that has ended."""

    record: BatchRecord
    counts: BatchCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedHook:
    """A webhook to deliver: what has ended, and the number of this try, from 1."""

    subject: Job | EndedBatch
    attempt: int

    @property
    def id(self) -> str:
        """The id of the job or batch."""
        return self.subject.spec.id if isinstance(self.subject, Job) else self.subject.record.id

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return self.subject.spec.tenant if isinstance(self.subject, Job) else self.subject.record.tenant

    @property
    def url(self) -> str:
        """Where it goes."""
        return self.subject.spec.webhook if isinstance(self.subject, Job) else self.subject.record.webhook


@dataclass(frozen=True, slots=True, kw_only=True)
class HookClaims:
    """The webhooks that were claimed; `due_in_s` as in JobClaims."""

    hooks: tuple[ClaimedHook, ...]
    due_in_s: float | None
