"""The loop that carries batches on: their lines become jobs, their results files. On the gateway that leads.

Each step replaces the record that it began with, or has no effect: two gateways that both believe to lead do
no harm.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing, suppress

import msgspec

from gateway.core.errors import ApiError
from gateway.core.ids import new_request_id
from gateway.core.settings import JobSettings
from gateway.jobs.batch_input import BatchCall, InputCheck, LineBounds, LineSplitter, parse_call
from gateway.jobs.batch_output import split_results
from gateway.jobs.batch_steps import (
    Advance,
    CancelLines,
    FlushResults,
    QueueLines,
    Validate,
    Wait,
    next_step,
)
from gateway.jobs.file_store import read_parts, store_part
from gateway.requests.services import Services
from rdmacast.aio.groups import cancel_and_discard
from registry.errors import NotFound, RegistryError
from registry.records.batch import BatchFault, BatchRecord, BatchStatus, FilePart, FilePurpose, FileRecord
from registry.records.job import JobEvent, JobEventKind, JobOutcome, JobSpec, JobStatus, Submission

_log = logging.getLogger("hypercast.gateway")

_RETRY_S = 1.0  # after a failure, and while the queue has no room
_CANCEL_S = 5.0  # between two looks at lines that are being cancelled
_SWEEP_S = 600.0
_CALL_BYTES = 1 << 20  # of the bodies that one step queues, beyond the first
_STEPS_AT_ONCE = 4


class BatchDriver:
    """The batches of the cluster, while `leads` returns true."""

    def __init__(self, services: Services, settings: JobSettings, leads: Callable[[], bool]) -> None:
        self._services = services
        self._settings = settings
        self._leads = leads
        self._state = services.state
        self._bounds = LineBounds(
            lines=settings.batch_lines, line_bytes=settings.body_bytes, limits=services.settings.limits
        )
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._news: dict[str, asyncio.Event] = {}
        self._wake = asyncio.Event()
        self._led = False
        self._slots = asyncio.Semaphore(_STEPS_AT_ONCE)

    def __repr__(self) -> str:
        return f"<BatchDriver {len(self._tasks)} open{'' if self._led else ', not leading'}>"

    async def run(self) -> None:
        """Carry batches on until cancelled."""
        self._services.cluster.subscribe(self._on_view)
        sweeping = asyncio.create_task(self._sweep(), name="file sweep")
        try:
            with self._services.job_events.listening(self._on_events):
                while True:
                    self._wake.clear()
                    retry_s = await self._follow()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(retry_s):
                            await self._wake.wait()
        finally:
            await cancel_and_discard(sweeping, *self._tasks.values())

    def _on_view(self) -> None:
        if self._leads() is not self._led:
            self._wake.set()

    def _on_events(self, events: Sequence[JobEvent]) -> None:
        for event in events:
            if event.kind is not JobEventKind.BATCH:
                continue
            if event.id in self._news:
                self._news[event.id].set()
            else:
                self._wake.set()
        if not events:
            self._wake.set()
            for news in self._news.values():
                news.set()

    async def _follow(self) -> float | None:
        """Start what is open, or end all; return when to try again if that failed."""
        self._led = self._leads()
        if not self._led:
            tasks, self._tasks, self._news = list(self._tasks.values()), {}, {}
            await cancel_and_discard(*tasks)
            return None
        try:
            open_ids = await self._state.open_batches()
        except RegistryError:
            return _RETRY_S
        for batch_id in open_ids:
            if batch_id not in self._tasks:
                self._news[batch_id] = asyncio.Event()
                task = asyncio.create_task(self._carry_on(batch_id), name=f"batch {batch_id}")
                self._tasks[batch_id] = task
        return None

    async def _carry_on(self, batch_id: str) -> None:
        news = self._news[batch_id]
        try:
            while True:
                news.clear()
                try:
                    async with self._slots:
                        delay_s = await self._step(batch_id)
                except (RegistryError, ApiError) as error:
                    _log.warning("batch %s: %s", batch_id, error)
                    delay_s = _RETRY_S
                except Exception:  # whatever it is, the other batches go on
                    _log.exception("batch %s: a step failed", batch_id)
                    delay_s = 30 * _RETRY_S
                if delay_s == 0:
                    continue
                if delay_s is not None and delay_s < 0:
                    return
                with suppress(TimeoutError):
                    async with asyncio.timeout(delay_s):
                        await news.wait()
        finally:
            if self._news.get(batch_id) is news:
                del self._tasks[batch_id], self._news[batch_id]

    async def _step(self, batch_id: str) -> float | None:
        """Take a step; return the seconds until the next without news: 0 at once, less than 0 never."""
        try:
            record, counts = await self._state.batch(batch_id)
        except NotFound:
            return -1
        if record.status.is_final:
            return -1
        now = self._services.clock.wall_s()
        match next_step(record, counts, now):
            case Validate():
                await self._validate(record)
            case QueueLines(lines):
                while await self._queue(record, lines) in (Submission.FULL, Submission.TENANT_FULL):
                    if lines == 1:
                        return _RETRY_S
                    lines = max(1, lines // 4)
            case FlushResults(lines):
                await self._flush(record, lines)
            case CancelLines():
                await self._cancel(record)
                return _CANCEL_S
            case Advance(status):
                await self._advance(record, status)
            case Wait(seconds):
                return None if seconds is None else max(0.001, seconds)
        return 0

    async def _validate(self, record: BatchRecord) -> None:
        check = InputCheck(record.endpoint, self._bounds)
        try:
            file = await self._state.file(record.input_file)
            async with aclosing(read_parts(self._services.blobs, file.parts)) as parts:  # type: ignore[type-var]
                async for data in parts:
                    if not await asyncio.to_thread(check.feed, data):
                        break
            await asyncio.to_thread(check.end)
        except NotFound:
            check.faults = [BatchFault(code="file_not_found", message="its file is gone")]
        if check.faults:
            await self._replace(record, BatchStatus.FAILED, faults=tuple(check.faults))
        else:
            await self._replace(record, BatchStatus.IN_PROGRESS, total=check.total)

    async def _queue(self, record: BatchRecord, lines: int) -> Submission:
        try:
            file = await self._state.file(record.input_file)
            calls = await self._calls(record, file, lines)
        except NotFound:  # deleted meanwhile: what was queued is all
            return await self._replace(record, record.status, total=record.queued)
        if not calls:
            return await self._replace(record, record.status, total=record.queued)
        now = self._services.clock.wall_s()
        jobs = []
        for number, call in enumerate(calls, record.queued):
            spec = JobSpec(
                id=f"{record.id}-{number}",
                request_id=new_request_id(),
                name=call.custom_id,
                tenant=record.tenant,
                key_id=record.key_id,
                path=record.endpoint,
                model=call.model,
                created_at=now,
                expires_at=record.expires_at,
                batch=record.id,
                line=number,
                custom_id=call.custom_id,
            )
            jobs.append((spec, call.body))
        after = msgspec.structs.replace(record, queued=record.queued + len(calls), offset=calls[-1].end)
        return await self._state.replace_batch(record, after, lines=jobs, bounds=self._settings.bounds)

    async def _calls(self, record: BatchRecord, file: FileRecord, most: int) -> list[BatchCall]:
        """Return the next calls of its file, at least one while there are some."""
        splitter = LineSplitter(record.offset)
        calls: list[BatchCall] = []
        nbytes = 0

        def take(found: Iterable[tuple[bytes, int]]) -> bool:
            nonlocal nbytes
            for raw, end in found:
                if len(calls) >= most or nbytes >= _CALL_BYTES:
                    return False
                calls.append(parse_call(raw, record.endpoint, self._bounds, end))
                nbytes += len(raw)
            return True

        source = read_parts(self._services.blobs, file.parts, record.offset)
        async with aclosing(source) as parts:  # type: ignore[type-var]
            async for data in parts:
                if not await asyncio.to_thread(take, splitter.feed(data)):
                    return calls
        take(splitter.last())
        return calls

    async def _flush(self, record: BatchRecord, lines: int) -> None:
        results = await self._state.batch_results(record.id, lines)
        output, errors = await asyncio.to_thread(split_results, results)
        after = msgspec.structs.replace(
            record,
            flushed=record.flushed + len(results),
            output=record.output + await self._stored(output),
            errors=record.errors + await self._stored(errors),
        )
        await self._state.replace_batch(record, after, taken=len(results))

    async def _stored(self, lines: bytes) -> tuple[FilePart, ...]:
        return (await store_part(self._services.blobs, lines),) if lines else ()

    async def _cancel(self, record: BatchRecord) -> None:
        now = self._services.clock.wall_s()
        outcome = JobOutcome(status=JobStatus.CANCELLED, ended_at=now)
        for job_id in await self._state.batch_lines(record.id):
            with suppress(NotFound):
                await self._state.cancel_job(job_id, outcome, b"", keep_s=self._settings.keep_s)

    async def _advance(self, record: BatchRecord, status: BatchStatus) -> None:
        if not status.is_final:
            await self._replace(record, status)
            return
        files = []
        names = {"output": "", "errors": ""}
        for what in names:
            parts: tuple[FilePart, ...] = getattr(record, what)
            if parts:
                file = self._output_file(record, what, parts)
                names[what] = file.id
                files.append(file)
        await self._replace(
            record, status, files=files, output_file=names["output"], error_file=names["errors"]
        )

    def _output_file(self, record: BatchRecord, what: str, parts: tuple[FilePart, ...]) -> FileRecord:
        now = self._services.clock.wall_s()
        return FileRecord(
            id=f"file-{secrets.token_hex(12)}",
            tenant=record.tenant,
            name=f"{record.id}_{what}.jsonl",
            purpose=FilePurpose.BATCH_OUTPUT,
            created_at=now,
            expires_at=now + self._settings.files_keep_s,
            parts=parts,
        )

    async def _replace(
        self, record: BatchRecord, status: BatchStatus, *, files: Sequence[FileRecord] = (), **changes: object
    ) -> Submission:
        times = dict(record.times)
        if status is not record.status:
            times[status.value] = self._services.clock.wall_s()
            _log.info("batch %s: %s -> %s", record.id, record.status.value, status.value)
        after = msgspec.structs.replace(record, status=status, times=times, **changes)
        return await self._state.replace_batch(record, after, files=files, keep_s=self._settings.files_keep_s)

    async def _sweep(self) -> None:
        while True:
            if self._leads():
                try:
                    while await self._state.sweep_files(self._services.clock.wall_s()):
                        pass
                except RegistryError as error:
                    _log.info("files: not swept: %s", error)
            await asyncio.sleep(_SWEEP_S)
