"""From what a request's calls used to its record in the ledger."""

import asyncio
import logging
import math
from collections.abc import Sequence

from gateway.callrun import CallRun
from gateway.contract import Settled
from gateway.entry import Entry
from gateway.errors import ApiError
from gateway.exchange import Exchange
from gateway.outlast import outlast
from gateway.pulse import Pulse
from gateway.spool import Spool
from registry.clock import Clock
from registry.errors import NotFound, StateUnavailable
from registry.function import FunctionVersion
from registry.messages import Compute, Generate
from registry.state import Ledger
from registry.usage import Rate, RequestRecord, RequestStatus, cost_nanos

_log = logging.getLogger("hypercast.gateway")

_RETRY_AFTER_S = 5
_PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
_WRITE_S = 8.0  # a request waits so long for its bill at most


class BillingFailed(ApiError):
    """The ledger did not take a record."""

    def __init__(self, request_id: str) -> None:
        super().__init__(
            503,
            "billing_failed",
            f"request {request_id} cannot be billed: the registry does not answer",
            retry_after_s=_RETRY_AFTER_S,
        )


def prompt_tokens(runs: Sequence[CallRun]) -> int:
    """Tokens of the prompts, each prompt once however many choices it has."""
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
                total += run.usage.prompt_tokens if run.usage else 0
    return total


def completion_tokens(runs: Sequence[CallRun]) -> int:
    """Tokens generated; of a call that was cut short, those that were passed on to the client."""
    return sum(run.usage.completion_tokens if run.usage else run.passed_on for run in runs)


def make_record(
    *,
    exchange: Exchange,
    version: FunctionVersion,
    runs: Sequence[CallRun],
    status: RequestStatus,
    ended_at: float,
    pulse: Pulse,
) -> RequestRecord | None:
    """The record of a request that ends now; None if no instance ever took it. A failed request costs
    nothing, but the accelerator time that it took is in its record."""
    assigned = [run.assigned for run in runs if run.assigned is not None]
    if not assigned:
        return None
    first = assigned[0]
    # Counted from the end: how long the request took before its calls began is known nowhere else.
    ago_s = max([run.assigned_ago_s for run in runs if run.assigned is not None])
    slices = tuple([use.gpu for run in runs for use in run.used if use.gpu.gpu_us])
    # Requests that share a step share its time; it is rounded up once, for the whole request.
    gpu_ms = -(-sum([one.gpu_us for one in slices]) // 1000)
    tokens_in, tokens_out = prompt_tokens(runs), completion_tokens(runs)
    rate = _rate(first.gpu_type, pulse)
    price = cost_nanos(rate, gpu_ms, tokens_in, tokens_out)
    return RequestRecord(
        request_id=exchange.request_id,
        tenant=exchange.caller.tenant,
        key_id=exchange.caller.id,
        function=version.function,
        version=version.version,
        status=status,
        start_kind=first.start_kind,
        node=first.node,
        gpu_type=first.gpu_type,
        gpu_count=first.gpu_count,
        received_at=exchange.received_at,
        started_at=max(exchange.received_at, ended_at - ago_s),
        ended_at=ended_at,
        queue_ms=math.ceil(max([one.queue_ms for one in assigned])),
        load_ms=math.ceil(max([one.load_ms for one in assigned])),
        exec_ms=math.ceil(max([run.exec_ms for run in runs])),
        billed_gpu_ms=gpu_ms,
        prompt_tokens=tokens_in,
        completion_tokens=tokens_out,
        rate_id=rate.id,
        cost_nanos=0 if status is RequestStatus.FAILED else price,
        gpu=slices,
    )


def _rate(gpu_type: str, pulse: Pulse) -> Rate:
    """The rate in force; nothing is charged for a device that the price table does not know."""
    try:
        return pulse.rate(gpu_type)
    except NotFound:
        _log.warning("the price table has no rate for %s: not charged", gpu_type)
        return Rate(
            id="unpriced",
            gpu_type=gpu_type,
            gpu_second_nanos=0,
            request_nanos=0,
            prompt_mtoken_nanos=0,
            completion_mtoken_nanos=0,
        )


class Biller:
    """Writes records to the ledger, surely: a client that leaves does not stop the write. `settled` hears
    of the calls whose record is written."""

    def __init__(self, ledger: Ledger, pulse: Pulse, clock: Clock, settled: Settled) -> None:
        self._ledger = ledger
        self._pulse = pulse
        self._clock = clock
        self._settled = settled
        self.pauses_s: Sequence[float] = _PAUSES_S  # between the tries to write a record
        self.spool = Spool(ledger, settled)
        self._writes: set[asyncio.Task[None]] = set()

    async def settle(
        self,
        exchange: Exchange,
        version: FunctionVersion,
        runs: Sequence[CallRun],
        status: RequestStatus,
    ) -> None:
        """Write the request's record; returns once the ledger has it. Raises BillingFailed; then it is
        written later, and costs nothing if it was to be a good one."""
        record = make_record(
            exchange=exchange,
            version=version,
            runs=runs,
            status=status,
            ended_at=max(self._clock.wall_s(), exchange.received_at),
            pulse=self._pulse,
        )
        if record is None:
            return
        entry = Entry(record, [use for run in runs for use in run.used])
        write = asyncio.create_task(self._write(entry))
        self._writes.add(write)
        write.add_done_callback(self._writes.discard)
        await outlast(write)

    async def _write(self, entry: Entry) -> None:
        try:
            async with asyncio.timeout(_WRITE_S):
                for pause_s in self.pauses_s:
                    if await self._try(entry):
                        return
                    await asyncio.sleep(pause_s)
                if await self._try(entry):
                    return
        except TimeoutError:
            self._pulse.note(alive=False, reason=f"no answer in {_WRITE_S:g} s")
        _log.error("not billed now, the ledger does not answer: %s", entry.record.request_id)
        entry.unacknowledged()
        self.spool.put(entry)
        raise BillingFailed(entry.record.request_id)

    async def _try(self, entry: Entry) -> bool:
        try:
            await entry.write(self._ledger)
        except StateUnavailable as error:
            self._pulse.note(alive=False, reason=str(error))
            return False
        self._pulse.note(alive=True)
        self._settled(entry.uses)
        return True

    async def aclose(self) -> None:
        """Wait for the writes under way, and try once more those that the ledger did not take."""
        await asyncio.gather(*self._writes, return_exceptions=True)
        await self.spool.aclose()
