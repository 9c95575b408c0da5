"""Jobs, files and batches in one process, as in `registry.redis.jobs` and `registry.redis.batches`."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from registry.clock import Clock
from registry.errors import NotFound
from registry.keys import JOB_EVENTS_LENGTH
from registry.records.batch import BatchCounts, BatchRecord, FilePart, FileRecord
from registry.records.hook import ClaimedHook, EndedBatch, HookClaims
from registry.records.job import (
    ClaimedJob,
    HookStatus,
    Job,
    JobBounds,
    JobClaims,
    JobEvent,
    JobEventKind,
    JobLease,
    JobOutcome,
    JobSpec,
    JobStatus,
    LeaseRenewal,
    LineResult,
    Submission,
)
from registry.records.job_counts import JobCounts
from registry.records.usage import RequestRecord
from registry.state import FileState, JobState


@dataclass(slots=True)
class _StoredJob:
    """A job, and what the queue has of it; `order` is its place."""

    job: Job
    order: tuple[int, int]
    nbytes: int
    queued_s: float
    lost: int = 0
    bill: RequestRecord | None = None
    keep_s: float = 0.0
    tries: int = 0


class _Usage:
    """Amounts in all and by tenant."""

    def __init__(self) -> None:
        self._used: Counter[tuple[str, str]] = Counter()

    def count(self, what: str, tenant: str, amount: int) -> None:
        self._used[what, ""] += amount
        self._used[what, tenant] += amount

    def beyond(self, what: str, tenant: str, amount: int, limit: int) -> Submission | None:
        if self._used[what, ""] + amount > limit:
            return Submission.FULL
        if self._used[what, tenant] + amount > limit / 2:
            return Submission.TENANT_FULL
        return None


class MemoryJobs(JobState, FileState):
    """All jobs, files and batches, by the clock's monotonic time."""

    def __init__(self, clock: Clock) -> None:
        self._job_clock = clock
        self._jobs: dict[str, _StoredJob] = {}
        self._turns: dict[str, int] = {}
        self._serial = self._ever = 0
        self._running: dict[str, float] = {}
        self._later: dict[str, float] = {}
        self._ended: dict[str, float] = {}
        self._hooks: dict[str, float] = {}
        self._usage = _Usage()
        self._watchers: list[deque[JobEvent]] = []
        self._happened = asyncio.Event()
        self._files: dict[str, FileRecord] = {}
        self._batches: dict[str, BatchRecord] = {}
        self._counts: dict[str, BatchCounts] = {}
        self._results: dict[str, list[LineResult]] = {}
        self._batch_expiry: dict[str, float] = {}
        self._batch_tries: Counter[str] = Counter()

    # --- jobs

    async def submit_job(self, spec: JobSpec, body: bytes, bounds: JobBounds) -> Submission:
        if spec.id in self._jobs:
            return Submission.EXISTS
        usage, tenant = self._usage, spec.tenant
        full = usage.beyond("jobs", tenant, 1, bounds.jobs)
        full = full or usage.beyond("bytes", tenant, len(body), bounds.job_bytes)
        if full is not None:
            return full
        self._add(spec, body, kind=0)
        self._event(JobEventKind.QUEUED, spec.id)
        return Submission.QUEUED

    async def job(self, job_id: str) -> Job:
        if job_id not in self._jobs:
            raise NotFound(f"no job {job_id}")
        return self._jobs[job_id].job

    async def predictions(
        self, tenant: str, *, limit: int, after: str | None = None
    ) -> tuple[list[Job], bool]:
        own = [
            stored
            for stored in self._jobs.values()
            if stored.job.spec.tenant == tenant and not stored.job.spec.batch
        ]
        own.sort(key=lambda stored: stored.order, reverse=True)
        ids = [stored.job.spec.id for stored in own]
        if after is not None and after not in ids:
            raise NotFound(f"no job {after}")
        first = 0 if after is None else ids.index(after) + 1
        page = [
            replace(
                stored.job,
                body=b"",
                result=stored.job.result if stored.job.status is JobStatus.FAILED else b"",
            )
            for stored in own[first : first + limit]
        ]
        return page, first + limit < len(own)

    async def job_counts(self) -> JobCounts:
        jobs = self._jobs.values()
        now = self._job_clock.monotonic_s()
        waits = [now - stored.queued_s for stored in jobs if stored.job.status is JobStatus.QUEUED]
        return JobCounts(
            predictions=Counter(stored.job.status for stored in jobs if not stored.job.spec.batch),
            lines=Counter(stored.job.status for stored in jobs if stored.job.spec.batch),
            batches=Counter(batch.status for batch in self._batches.values()),
            oldest_queued_s=max(waits, default=None),
        )

    async def claim_jobs(self, limit: int, *, ttl_s: float, without: Sequence[str] = ()) -> JobClaims:
        now = self._job_clock.monotonic_s()
        for job_id in _due(self._ended, now):
            if job_id in self._hooks:
                self._ended[job_id] = now + 60
            else:
                del self._ended[job_id]
                self._forget(job_id)
        for job_id in _due(self._later, now):
            del self._later[job_id]
            self._take_turn(self._jobs[job_id].job.spec.tenant)
        for job_id in _due(self._running, now):
            del self._running[job_id]
            stored = self._jobs[job_id]
            if stored.job.status is JobStatus.RUNNING:
                stored.lost += 1
                stored.job = replace(stored.job, status=JobStatus.QUEUED)
            self._take_turn(stored.job.spec.tenant)
        claimed: list[ClaimedJob] = []
        while len(claimed) < limit:
            tenants = [name for name in self._turns if name not in without]
            if not tenants:
                break
            tenant = min(tenants, key=lambda name: (self._turns[name], name))
            waiting = self._waiting(tenant)
            if not waiting:
                del self._turns[tenant]
                continue
            self._serial += 1
            self._turns[tenant] = self._serial
            claimed.append(self._claim(waiting[0], now + ttl_s))
        return JobClaims(jobs=tuple(claimed), due_in_s=_due_in(now, self._later, self._running, self._ended))

    async def renew_jobs(self, leases: Sequence[JobLease], *, ttl_s: float) -> LeaseRenewal:
        held = [lease for lease in leases if self._holds(lease)]
        for lease in held:
            self._running[lease.id] = self._job_clock.monotonic_s() + ttl_s
        return LeaseRenewal(
            lost=tuple([lease for lease in leases if lease not in held]),
            cancelling=tuple([lease for lease in held if self._jobs[lease.id].job.cancelling]),
        )

    async def requeue_job(self, lease: JobLease, *, delay_s: float = 0.0) -> bool:
        if not self._holds(lease):
            return False
        del self._running[lease.id]
        stored = self._jobs[lease.id]
        if stored.job.status is JobStatus.RUNNING:
            stored.job = replace(stored.job, status=JobStatus.QUEUED)
        if delay_s > 0:
            self._later[lease.id] = self._job_clock.monotonic_s() + delay_s
        else:
            self._take_turn(stored.job.spec.tenant)
        self._event(JobEventKind.QUEUED, lease.id)
        return True

    async def finish_job(
        self,
        lease: JobLease,
        outcome: JobOutcome,
        result: bytes,
        *,
        keep_s: float,
        bill: RequestRecord | None = None,
    ) -> bool:
        stored = self._jobs.get(lease.id)
        if stored is None or stored.job.attempt != lease.attempt:
            return False
        if stored.job.status is not JobStatus.RUNNING:
            return stored.job.outcome == outcome
        if lease.id not in self._running:
            return False
        status = stored.job.status if bill is None else JobStatus.BILLING
        stored.job = replace(stored.job, outcome=outcome, result=result, status=status)
        stored.keep_s, stored.bill = keep_s, bill
        if bill is None:
            self._close(stored)
        return True

    async def settle_job(self, lease: JobLease, *, keep_s: float) -> bool:
        stored = self._jobs.get(lease.id)
        if stored is None or stored.job.attempt != lease.attempt:
            return False
        if stored.job.status is not JobStatus.BILLING:
            return stored.job.status.is_final
        stored.keep_s = keep_s
        self._close(stored)
        return True

    async def cancel_job(self, job_id: str, outcome: JobOutcome, result: bytes, *, keep_s: float) -> Job:
        stored = self._jobs.get(job_id)
        if stored is None:
            raise NotFound(f"no job {job_id}")
        if stored.job.status is JobStatus.QUEUED:
            self._later.pop(job_id, None)
            stored.job = replace(stored.job, cancelling=True, outcome=outcome, result=result)
            stored.keep_s = keep_s
            self._close(stored)
        elif stored.job.status is JobStatus.RUNNING and not stored.job.cancelling:
            stored.job = replace(stored.job, cancelling=True)
            self._event(JobEventKind.CANCELLING, job_id)
        return await self.job(job_id)

    async def claim_hooks(self, limit: int, *, ttl_s: float, without: Sequence[str] = ()) -> HookClaims:
        now = self._job_clock.monotonic_s()
        claimed: list[ClaimedHook] = []
        for subject_id in _due(self._hooks, now):
            stored, batch = self._jobs.get(subject_id), self._batches.get(subject_id)
            if stored is not None:
                hook = ClaimedHook(subject=stored.job, attempt=stored.tries + 1)
            else:
                assert batch is not None
                ended = EndedBatch(record=batch, counts=self._counts[subject_id])
                hook = ClaimedHook(subject=ended, attempt=self._batch_tries[subject_id] + 1)
            if len(claimed) >= limit or hook.tenant in without:
                continue
            if stored is not None:
                stored.tries += 1
            else:
                self._batch_tries[subject_id] += 1
            self._hooks[subject_id] = now + ttl_s
            claimed.append(hook)
        return HookClaims(hooks=tuple(claimed), due_in_s=_due_in(now, self._hooks))

    async def end_hook(
        self, subject_id: str, attempt: int, status: HookStatus, *, retry_in_s: float = 0.0
    ) -> bool:
        stored = self._jobs.get(subject_id)
        tries = self._batch_tries[subject_id] if stored is None else stored.tries
        if tries != attempt or subject_id not in self._hooks:
            return False
        if stored is not None:
            stored.job = replace(stored.job, hook=status)
        else:
            self._counts[subject_id] = msgspec.structs.replace(self._counts[subject_id], hook=status)
        if status is HookStatus.WAITING:
            self._hooks[subject_id] = self._job_clock.monotonic_s() + retry_in_s
        else:
            del self._hooks[subject_id]
        self._event(JobEventKind.HOOK, subject_id)
        return True

    async def watch_jobs(self) -> AsyncIterator[Sequence[JobEvent]]:
        events: deque[JobEvent] = deque(maxlen=JOB_EVENTS_LENGTH)
        self._watchers.append(events)
        try:
            yield ()
            while True:
                if not events:
                    await self._happened.wait()
                    continue
                found = list(events)
                events.clear()
                yield found
        finally:
            self._watchers = [other for other in self._watchers if other is not events]

    # --- files and batches

    async def put_file(self, record: FileRecord, *, files: int, file_bytes: int) -> Submission:
        if record.id in self._files:
            return Submission.EXISTS
        usage, tenant = self._usage, record.tenant
        full = usage.beyond("files", tenant, 1, files)
        full = full or usage.beyond("file-bytes", tenant, record.size, file_bytes)
        if full is not None:
            return full
        self._put_file(record)
        return Submission.QUEUED

    async def file(self, file_id: str) -> FileRecord:
        if file_id not in self._files:
            raise NotFound(f"no file {file_id}")
        return self._files[file_id]

    async def files(self, tenant: str) -> list[FileRecord]:
        own = [file for file in self._files.values() if file.tenant == tenant]
        return sorted(own, key=lambda file: (file.created_at, file.id), reverse=True)

    async def delete_file(self, file_id: str) -> None:
        file = self._files.pop(file_id, None)
        if file is not None:
            self._usage.count("files", file.tenant, -1)
            self._usage.count("file-bytes", file.tenant, -file.size)

    async def file_digests(self) -> frozenset[str]:
        parts: list[FilePart] = []
        for file in self._files.values():
            parts += file.parts
        for batch in self._batches.values():
            if not batch.status.is_final:
                parts += (*batch.output, *batch.errors)
        return frozenset([part.digest for part in parts])

    async def sweep_files(self, now: float) -> int:
        files = [file.id for file in self._files.values() if file.expires_at <= now]
        for file_id in files:
            await self.delete_file(file_id)
        due = _due(self._batch_expiry, now)
        batches = [batch_id for batch_id in due if batch_id not in self._hooks]
        for batch_id in batches:
            del self._batch_expiry[batch_id]
            self._counts.pop(batch_id, None)
            del self._batch_tries[batch_id]
            self._usage.count("batches", self._batches.pop(batch_id).tenant, -1)
        return len(files) + len(batches)

    async def put_batch(self, record: BatchRecord, *, batches: int) -> Submission:
        if record.id in self._batches:
            return Submission.EXISTS
        full = self._usage.beyond("batches", record.tenant, 1, batches)
        if full is not None:
            return full
        self._batches[record.id] = record
        if record.webhook:
            self._counts[record.id] = BatchCounts(hook=HookStatus.WAITING)
        self._usage.count("batches", record.tenant, 1)
        self._event(JobEventKind.BATCH, record.id)
        return Submission.QUEUED

    async def batch(self, batch_id: str) -> tuple[BatchRecord, BatchCounts]:
        if batch_id not in self._batches:
            raise NotFound(f"no batch {batch_id}")
        return self._batches[batch_id], self._counts.get(batch_id, BatchCounts())

    async def batches(self, tenant: str) -> list[tuple[BatchRecord, BatchCounts]]:
        own = [batch for batch in self._batches.values() if batch.tenant == tenant]
        own.sort(key=lambda batch: (batch.created_at, batch.id), reverse=True)
        return [await self.batch(batch.id) for batch in own]

    async def open_batches(self) -> list[str]:
        return sorted(batch.id for batch in self._batches.values() if not batch.status.is_final)

    async def batch_lines(self, batch_id: str) -> list[str]:
        return sorted(id_ for id_, stored in self._jobs.items() if stored.job.spec.batch == batch_id)

    async def batch_results(self, batch_id: str, limit: int) -> list[LineResult]:
        return self._results.get(batch_id, [])[:limit]

    async def replace_batch(
        self,
        before: BatchRecord,
        after: BatchRecord,
        *,
        lines: Sequence[tuple[JobSpec, bytes]] = (),
        taken: int = 0,
        files: Sequence[FileRecord] = (),
        keep_s: float = 0.0,
        bounds: JobBounds | None = None,
    ) -> Submission:
        bounds, id_ = bounds or JobBounds(), before.id
        if self._batches.get(id_) != before:
            return Submission.EXISTS
        if lines:
            nbytes = sum(len(body) for _, body in lines)
            full = self._usage.beyond("jobs", before.tenant, len(lines), bounds.jobs)
            full = full or self._usage.beyond("bytes", before.tenant, nbytes, bounds.job_bytes)
            if full is not None:
                return full
        self._batches[id_] = after
        for file in files:
            self._put_file(file)
        for spec, body in lines:
            self._add(spec, body, kind=1)
        if lines:
            self._event(JobEventKind.QUEUED, id_)
        if taken:
            gone, self._results[id_] = self._results[id_][:taken], self._results[id_][taken:]
            self._count(id_, waiting=-len(gone), waiting_bytes=-sum(map(_line_bytes, gone)))
        if after.status.is_final:
            self._results.pop(id_, None)
            self._batch_expiry[id_] = after.times.get(after.status, 0.0) + keep_s
            if before.webhook:
                self._hooks[id_] = self._job_clock.monotonic_s()
                self._event(JobEventKind.HOOK, id_)
        self._event(JobEventKind.BATCH, id_)
        return Submission.QUEUED

    # --- parts of the changes

    def _event(self, kind: JobEventKind, id_: str) -> None:
        for events in self._watchers:
            events.append(JobEvent(kind, id_))
        self._happened.set()
        self._happened = asyncio.Event()

    def _add(self, spec: JobSpec, body: bytes, *, kind: int) -> None:
        self._ever += 1
        hook = HookStatus.WAITING if spec.webhook else None
        job = Job(spec=spec, body=body, status=JobStatus.QUEUED, hook=hook)
        nbytes = len(msgspec.json.encode(spec)) + len(body)
        now = self._job_clock.monotonic_s()
        self._jobs[spec.id] = _StoredJob(job, (kind, self._ever), nbytes, queued_s=now)
        self._usage.count("jobs", spec.tenant, 1)
        self._usage.count("bytes", spec.tenant, nbytes)
        self._take_turn(spec.tenant)

    def _take_turn(self, tenant: str) -> None:
        self._turns.setdefault(tenant, self._serial)

    def _waiting(self, tenant: str) -> list[str]:
        waiting = [
            (stored.order, id_)
            for id_, stored in self._jobs.items()
            if stored.job.spec.tenant == tenant
            and stored.job.status in (JobStatus.QUEUED, JobStatus.BILLING)
            and id_ not in self._later
            and id_ not in self._running
        ]
        return [id_ for _, id_ in sorted(waiting)]

    def _claim(self, job_id: str, until_s: float) -> ClaimedJob:
        stored = self._jobs[job_id]
        job = stored.job
        stored.job = replace(
            job,
            attempt=job.attempt + 1,
            status=JobStatus.RUNNING if job.status is JobStatus.QUEUED else job.status,
            started_at=self._job_clock.wall_s() if job.started_at is None else job.started_at,
        )
        self._running[job_id] = until_s
        return ClaimedJob(
            spec=job.spec,
            body=job.body,
            attempt=stored.job.attempt,
            lost=stored.lost,
            cancelling=job.cancelling,
            bill=stored.bill,
        )

    def _holds(self, lease: JobLease) -> bool:
        stored = self._jobs.get(lease.id)
        return stored is not None and stored.job.attempt == lease.attempt and lease.id in self._running

    def _close(self, stored: _StoredJob) -> None:
        job, id_ = stored.job, stored.job.spec.id
        assert job.outcome is not None
        self._running.pop(id_, None)
        if batch := job.spec.batch:
            line = LineResult(spec=job.spec, outcome=job.outcome, result=msgspec.Raw(job.result))
            self._results.setdefault(batch, []).append(line)
            good = job.outcome.status is JobStatus.SUCCEEDED
            self._count(batch, completed=good, failed=not good, waiting=1, waiting_bytes=_line_bytes(line))
            self._forget(id_)
            self._event(JobEventKind.BATCH, batch)
            return
        stored.job, stored.bill = replace(job, status=job.outcome.status), None
        stored.nbytes += len(job.result)
        self._usage.count("bytes", job.spec.tenant, len(job.result))
        now = self._job_clock.monotonic_s()
        self._ended[id_] = now + stored.keep_s
        if job.hook is not None:
            self._hooks[id_] = now
            self._event(JobEventKind.HOOK, id_)
        self._event(JobEventKind.ENDED, id_)

    def _forget(self, job_id: str) -> None:
        stored = self._jobs.pop(job_id)
        self._usage.count("jobs", stored.job.spec.tenant, -1)
        self._usage.count("bytes", stored.job.spec.tenant, -stored.nbytes)

    def _put_file(self, record: FileRecord) -> None:
        if record.id not in self._files:
            self._files[record.id] = record
            self._usage.count("files", record.tenant, 1)
            self._usage.count("file-bytes", record.tenant, record.size)

    def _count(self, batch_id: str, **amounts: int) -> None:
        known = self._counts.get(batch_id, BatchCounts())
        added = {name: getattr(known, name) + amount for name, amount in amounts.items()}
        self._counts[batch_id] = msgspec.structs.replace(known, **added)


def _line_bytes(line: LineResult) -> int:
    return len(line.result) + len(msgspec.json.encode(line.spec))


def _due(times: Mapping[str, float], now: float) -> list[str]:
    return sorted([id_ for id_, at in times.items() if at <= now], key=lambda id_: times[id_])


def _due_in(now: float, *times: Mapping[str, float]) -> float | None:
    first = min([at for each in times for at in each.values()], default=None)
    return None if first is None else max(0.0, first - now)
