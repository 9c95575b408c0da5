"""From what a request's calls used to its record in the ledger."""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Sequence
from enum import Enum

from gateway.callrun import CallRun
from gateway.contract import CallUse, Settled
from gateway.entry import Entry
from gateway.errors import ApiError
from gateway.exchange import Exchange
from gateway.outlast import see_out
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

    def __init__(self, request_id: str, why: str = "the registry does not answer") -> None:
        super().__init__(
            503,
            "billing_failed",
            f"request {request_id} cannot be billed: {why}",
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
    uses: Sequence[CallUse],
    status: RequestStatus,
    ended_at: float,
    pulse: Pulse,
) -> RequestRecord | None:
    """The record of a request that ends now and whose runs had these `uses`; None if no instance ever took
    it. A failed request costs nothing, but the accelerator time that it took is in its record."""
    assigned = [run.assigned for run in runs if run.assigned is not None]
    if not assigned:
        return None
    first = assigned[0]
    # Counted from the end: how long the request took before its calls began is known nowhere else.
    ago_s = max([run.assigned_ago_s for run in runs if run.assigned is not None])
    slices = tuple([use.gpu for use in uses if use.gpu.gpu_us])
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


class _Tried(Enum):
    """What came of a first try to write a record."""

    WRITTEN = "written"
    TAKEN = "taken"  # a record of that id is there: this one, by a write whose answer was lost, or another
    FAILED = "failed"  # the ledger could not take it
    SILENT = "silent"  # the time was up before it said so
    REFUSED = "refused"  # something else is wrong, maybe with just this record: to insist is of no use


class Biller:
    """Writes records to the ledger, surely: a client that leaves does not stop the write, and no error ends
    it. `settled` hears of the calls whose record is written."""

    def __init__(self, ledger: Ledger, pulse: Pulse, clock: Clock, settled: Settled) -> None:
        self._ledger = ledger
        self._pulse = pulse
        self._clock = clock
        self._settled = settled
        self.pauses_s: Sequence[float] = _PAUSES_S  # between the tries to write a record
        self.spool = Spool(ledger, settled)
        self._settling = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        # First tries under way, each with the time at which it is given up: one timer for all of them.
        self._writes: deque[tuple[float, asyncio.Future[bool]]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Biller {self._settling} settling, {self.spool!r}>"

    async def settle(
        self,
        exchange: Exchange,
        version: FunctionVersion,
        runs: Sequence[CallRun],
        status: RequestStatus,
    ) -> None:
        """Write the request's record; returns once the ledger has it. Raises BillingFailed; then it is
        written later, and costs nothing if it was to be a good one."""
        uses = [use for run in runs for use in run.used]
        record = make_record(
            exchange=exchange,
            version=version,
            runs=runs,
            uses=uses,
            status=status,
            ended_at=max(self._clock.wall_s(), exchange.received_at),
            pulse=self._pulse,
        )
        if record is None:
            return
        self._settling += 1
        self._quiet.clear()
        try:
            await self._bill(Entry(record, uses))
        finally:
            self._settling -= 1
            if not self._settling:
                self._quiet.set()

    async def _bill(self, entry: Entry) -> None:
        until_s = asyncio.get_running_loop().time() + _WRITE_S
        write = self._begin(entry)
        self._give_up_at(until_s, write)
        cancelled = await see_out(write)
        first = self._outcome(entry, write)
        if first is _Tried.WRITTEN:
            self._settled(entry.uses)
        else:
            insist = asyncio.create_task(self._insist(entry, first, until_s))
            cancelled = await see_out(insist) or cancelled
            failure = insist.exception()
            if failure is not None and cancelled is None:
                raise failure
        if cancelled is not None:
            raise cancelled

    def _begin(self, entry: Entry) -> asyncio.Future[bool]:
        try:
            return asyncio.ensure_future(self._ledger.add_request(entry.record))
        except Exception as error:  # a record that cannot even be written down; told of by `_outcome`
            refused: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            refused.set_exception(error)
            return refused

    def _outcome(self, entry: Entry, write: asyncio.Future[bool]) -> "_Tried":
        if write.cancelled():
            return _Tried.SILENT
        try:
            new = write.result()
        except StateUnavailable as error:
            self._pulse.note(alive=False, reason=str(error))
            return _Tried.FAILED
        except Exception as error:  # whatever it is, the record is kept
            entry.refused(error)
            return _Tried.REFUSED
        self._pulse.note(alive=True)
        return _Tried.WRITTEN if new else _Tried.TAKEN

    def _give_up_at(self, until_s: float, write: asyncio.Future[bool]) -> None:
        while self._writes and self._writes[0][1].done():
            self._writes.popleft()
        self._writes.append((until_s, write))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_at(until_s, self._time_is_up)

    def _time_is_up(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        while self._writes and (self._writes[0][1].done() or self._writes[0][0] <= loop.time()):
            self._writes.popleft()[1].cancel()  # nothing happens to one that is done
        if self._writes:
            self._timer = loop.call_at(self._writes[0][0], self._time_is_up)

    async def _insist(self, entry: Entry, first: "_Tried", until_s: float) -> None:
        """Try on after a first try that brought no new record. Raises BillingFailed."""
        why = "the registry does not answer"
        try:
            async with asyncio.timeout_at(until_s):
                if first is _Tried.SILENT:
                    raise TimeoutError
                if first is not _Tried.REFUSED and await self._tries(entry, first):
                    return
        except TimeoutError:
            self._pulse.note(alive=False, reason=f"no answer in {_WRITE_S:g} s")
        except Exception as error:  # whatever it is, the record is kept
            entry.refused(error)
        if entry.is_refused:
            why = "the registry does not take its record"
        _log.error("not billed now, %s: %s", why, entry.record.request_id)
        entry.unacknowledged()
        self.spool.put(entry)
        raise BillingFailed(entry.record.request_id, why)

    async def _tries(self, entry: Entry, first: "_Tried") -> bool:
        """Whether the ledger took it in one of several tries."""
        if first is _Tried.TAKEN and await self._try(entry):
            return True
        for pause_s in self.pauses_s:
            await asyncio.sleep(pause_s)
            if await self._try(entry):
                return True
        return False

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
        await self._quiet.wait()
        if self._timer is not None:
            self._timer.cancel()
        await self.spool.aclose()
