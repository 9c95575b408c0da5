"""From the usage of a request's calls to its record in the ledger."""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Sequence
from enum import Enum
from functools import cached_property

from gateway.billing.outbox import Outbox
from gateway.billing.outbox_record import OutboxRecord
from gateway.core.contract import Assigned, CallUsage, OnSettled
from gateway.core.errors import ApiError
from gateway.core.open_call import OpenCall
from gateway.core.request_context import DeferredBill, RequestContext
from gateway.tenants.state_health import HealthCheck
from rdmacast.aio.shielded import abandon, wait_shielded
from registry.clock import Clock
from registry.errors import NotFound, StateUnavailable
from registry.messages.node import Compute, Generate
from registry.records.function import FunctionVersion
from registry.records.usage import GpuSlice, RequestRecord, RequestStatus, cost_nanos
from registry.state import Ledger

_log = logging.getLogger("hypercast.gateway")

_RETRY_AFTER_S = 5
_PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
_WRITE_TIMEOUT_S = 8.0  # a request waits at most this long for its record


class BillingFailed(ApiError):
    """The ledger did not accept a record (503)."""

    def __init__(self, request_id: str, why: str = "Redis is unavailable") -> None:
        super().__init__(
            503,
            "billing_failed",
            f"{why}: request {request_id} was served but could not be billed, so it costs nothing; retry it",
            retry_after_s=_RETRY_AFTER_S,
        )


def prompt_tokens(runs: Sequence[OpenCall]) -> int:
    """Return the tokens of the prompts, each counted once however many choices it has."""
    seen: set[int] = set()
    total = 0
    for run in runs:
        work = run.call.work
        match work:
            case Generate():
                if id(work.prompt_ids) not in seen:
                    seen.add(id(work.prompt_ids))
                    total += len(work.prompt_ids)
            case Compute():
                total += run.usage.prompt_tokens if run.usage else sum(map(len, work.token_ids))
            case _:
                total += run.usage.prompt_tokens if run.usage else run.prompt_tokens
    return total


def completion_tokens(runs: Sequence[OpenCall]) -> int:
    """Return the tokens generated; of a call that was cut short, those sent to the client."""
    total = 0
    for run in runs:
        total += run.usage.completion_tokens if run.usage else run.passed_on
    return total


def make_record(
    *,
    context: RequestContext,
    version: FunctionVersion,
    runs: Sequence[OpenCall],
    uses: Sequence[CallUsage],
    status: RequestStatus,
    ended_at: float,
    health: HealthCheck,
) -> RequestRecord | None:
    """Return the record of a request that ends now, None if no instance was ever assigned.

    A failed request costs nothing, but its record has the GPU time that it used.
    """
    first: Assigned | None = None
    ago_s = queue_ms = load_ms = exec_ms = 0.0
    for run in runs:
        exec_ms = max(exec_ms, run.exec_ms)
        if (one := run.assigned) is not None:
            first = first or one
            # Counted back from the end: the time before the calls started is recorded nowhere else.
            ago_s = max(ago_s, run.assigned_ago_s)
            queue_ms, load_ms = max(queue_ms, one.queue_ms), max(load_ms, one.load_ms)
    if first is None:
        return None
    slices: tuple[GpuSlice, ...] = ()
    gpu_us = 0
    for use in uses:
        if use.gpu.gpu_us:
            slices += (use.gpu,)
            gpu_us += use.gpu.gpu_us
    # Requests that share a step share its time; it is rounded up once, for the whole request.
    gpu_ms = -(-gpu_us // 1000)
    tokens_in, tokens_out = prompt_tokens(runs), completion_tokens(runs)
    rate_id, price = _price(health, first.gpu_type, gpu_ms, tokens_in, tokens_out)
    if status is RequestStatus.CANCELLED and any(run.failed for run in runs):
        good = [run for run in runs if not run.failed]  # only these delivered something
        good_ms = -(-sum(use.gpu.gpu_us for run in good for use in run.used) // 1000)
        _, price = _price(health, first.gpu_type, good_ms, prompt_tokens(good), completion_tokens(good))
    caller = context.caller
    return RequestRecord(
        request_id=context.request_id,
        client_request_id=context.client_request_id,
        tenant=caller.tenant,
        key_id=caller.id,
        function=version.function,
        version=version.version,
        status=status,
        start_kind=first.start_kind,
        node=first.node,
        gpu_type=first.gpu_type,
        gpu_count=first.gpu_count,
        received_at=context.received_at,
        started_at=max(context.received_at, ended_at - ago_s),
        ended_at=ended_at,
        queue_ms=math.ceil(queue_ms),
        load_ms=math.ceil(load_ms),
        exec_ms=math.ceil(exec_ms),
        billed_gpu_ms=gpu_ms,
        prompt_tokens=tokens_in,
        completion_tokens=tokens_out,
        rate_id=rate_id,
        cost_nanos=0 if status is RequestStatus.FAILED else price,
        gpu=slices,
    )


def _price(
    health: HealthCheck, gpu_type: str, gpu_ms: int, tokens_in: int, tokens_out: int
) -> tuple[str, int]:
    """Return the rate in force and the price; a device that the price table lacks is free of charge."""
    try:
        rate = health.rate(gpu_type)
    except NotFound:
        _log.warning("no price for GPU type %s: not charged", gpu_type)
        return "unpriced", 0
    return rate.id, cost_nanos(rate, gpu_ms, tokens_in, tokens_out)


class _WriteResult(Enum):
    """The outcome of the first try to write a record."""

    WRITTEN = "written"
    TAKEN = "taken"  # the id exists: this record, by a write whose reply was lost, or another
    FAILED = "failed"  # Redis was unavailable
    SILENT = "silent"  # timed out
    REFUSED = "refused"  # another error, perhaps of this record only: not retried here


class Biller:
    """The writer of request records: it retries on errors, and a client that leaves does not stop it.

    `on_settled` is called with the uses of each record that is written.
    """

    def __init__(self, ledger: Ledger, health: HealthCheck, clock: Clock, on_settled: OnSettled) -> None:
        self._ledger = ledger
        self.health = health
        self._clock = clock
        self._on_settled = on_settled
        self.pauses_s: Sequence[float] = _PAUSES_S  # between tries
        self.outbox = Outbox(ledger, on_settled)
        self._in_progress = 0
        self._quiet = asyncio.Event()  # set when nothing is in progress, cleared by `aclose`
        # First tries under way, each with its deadline: one timer serves all of them.
        self._writes: deque[tuple[float, asyncio.Future[bool]]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    def __repr__(self) -> str:
        return f"<Biller {self._in_progress} in progress, {self.outbox!r}>"

    async def bill(
        self,
        context: RequestContext,
        version: FunctionVersion,
        runs: Sequence[OpenCall],
        status: RequestStatus,
    ) -> RequestRecord | None:
        """Write the request's record, and return it once the ledger has it; None if it has none.

        Raises BillingFailed; the record is written later then, and costs nothing.
        """
        uses, record = self._made(context, version, runs, status)
        if record is None:
            return None
        self._in_progress += 1
        try:
            until_s = self._loop.time() + _WRITE_TIMEOUT_S
            try:
                write = self._ledger.add_request(record)
            except Exception as error:  # a record that does not encode; reported by `_retry`
                write = self._loop.create_future()
                write.set_exception(error)
            if not isinstance(write, asyncio.Future):
                write = asyncio.ensure_future(write)
            self._set_deadline(until_s, write)
            cancelled = await wait_shielded(write)
            first = self._result(write)
            if first is _WriteResult.WRITTEN:
                self._on_settled(uses)
            else:
                retry = asyncio.create_task(self._retry(OutboxRecord(record, uses), first, write, until_s))
                cancelled = await wait_shielded(retry) or cancelled
                failure = retry.exception()
                if failure is not None and cancelled is None:
                    raise failure
            if cancelled is not None:
                raise cancelled
            return record
        finally:
            self._in_progress -= 1
            if not self._in_progress:
                self._quiet.set()

    def defer(
        self,
        context: RequestContext,
        version: FunctionVersion,
        runs: Sequence[OpenCall],
        status: RequestStatus,
        bill: DeferredBill,
    ) -> None:
        """Make the request's record, for `write_deferred`."""
        bill.uses, bill.record = self._made(context, version, runs, status)

    async def write_deferred(self, record: RequestRecord, uses: Sequence[CallUsage] = ()) -> None:
        """Write the record of a job, which may have been written before. Raises StateUnavailable."""
        entry = OutboxRecord(record, uses)
        try:
            await entry.write(self._ledger)
        except StateUnavailable as error:
            self.health.report(alive=False, reason=str(error))
            raise
        self._on_settled(entry.uses)

    def _made(
        self,
        context: RequestContext,
        version: FunctionVersion,
        runs: Sequence[OpenCall],
        status: RequestStatus,
    ) -> tuple[tuple[CallUsage, ...], RequestRecord | None]:
        uses = runs[0].used if len(runs) == 1 else tuple([use for run in runs for use in run.used])
        record = make_record(
            context=context,
            version=version,
            runs=runs,
            uses=uses,
            status=status,
            ended_at=max(self._clock.wall_s(), context.received_at),
            health=self.health,
        )
        return uses, record

    def _result(self, write: asyncio.Future[bool]) -> "_WriteResult":
        if write.cancelled():
            return _WriteResult.SILENT
        try:
            new = write.result()
        except TimeoutError:  # abandoned at its deadline
            return _WriteResult.SILENT
        except StateUnavailable as error:
            self.health.report(alive=False, reason=str(error))
            return _WriteResult.FAILED
        except Exception:  # whatever it is, the record is kept
            return _WriteResult.REFUSED
        if not self.health.alive:
            self.health.report(alive=True)
        return _WriteResult.WRITTEN if new else _WriteResult.TAKEN

    def _set_deadline(self, until_s: float, write: asyncio.Future[bool]) -> None:
        while self._writes and self._writes[0][1].done():
            self._writes.popleft()
        self._writes.append((until_s, write))
        if self._timer is None:
            self._timer = self._loop.call_at(until_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        while self._writes and (self._writes[0][1].done() or self._writes[0][0] <= self._loop.time()):
            abandon(self._writes.popleft()[1])  # a no-op if it is done
        if self._writes:
            self._timer = self._loop.call_at(self._writes[0][0], self._on_timer)

    async def _retry(
        self, entry: OutboxRecord, first: "_WriteResult", write: asyncio.Future[bool], until_s: float
    ) -> None:
        """Retry after a first try that wrote nothing new. Raises BillingFailed."""
        why = ""
        if first is _WriteResult.REFUSED and (reason := write.exception()) is not None:
            entry.on_refused(reason)
        try:
            async with asyncio.timeout_at(until_s):
                if first is _WriteResult.SILENT:
                    raise TimeoutError
                if first is not _WriteResult.REFUSED and await self._tries(entry, first):
                    return
        except TimeoutError:
            self.health.report(alive=False, reason=f"no answer in {_WRITE_TIMEOUT_S:g} s")
        except Exception as error:  # whatever it is, the record is kept
            entry.on_refused(error)
        if entry.is_refused:
            why = "the ledger rejects its record"
        why = why or f"Redis is unavailable ({self.health.reason})"
        _log.error("request %s: not billed yet: %s", entry.record.request_id, why)
        entry.void()
        self.outbox.add(entry)
        raise BillingFailed(entry.record.request_id, why)

    async def _tries(self, entry: OutboxRecord, first: "_WriteResult") -> bool:
        """Return whether the ledger accepted it in one of several tries."""
        if first is _WriteResult.TAKEN and await self._try(entry):
            return True
        for pause_s in self.pauses_s:
            await asyncio.sleep(pause_s)
            if await self._try(entry):
                return True
        return False

    async def _try(self, entry: OutboxRecord) -> bool:
        try:
            await entry.write(self._ledger)
        except StateUnavailable as error:
            self.health.report(alive=False, reason=str(error))
            return False
        self.health.report(alive=True)
        self._on_settled(entry.uses)
        return True

    async def aclose(self) -> None:
        """Wait for the writes under way, and try the outbox once more."""
        self._quiet.clear()
        if self._in_progress:
            await self._quiet.wait()
        if self._timer is not None:
            self._timer.cancel()
        await self.outbox.aclose()
