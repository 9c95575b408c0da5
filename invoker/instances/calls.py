"""The calls that this node remembers: until the gateway says that they are in the ledger."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from invoker.engine.contract import EngineCall
from invoker.meter import GpuMeter
from invoker.meter_accounts import Account, MeteredCall
from invoker.turns import Turns
from registry.channel_server import caller

MAX_ENDED = 100_000  # calls that have ended; a gateway settles within a second
MAX_MISSED = 4096  # ids that a gateway asked for before anything was run for them here
MAX_AGE_S = 900.0
TICK_S = 1.0
END_S = 2.0  # a gateway waits a little longer for the figures of calls that were cut short

log = logging.getLogger("invoker.calls")


class Call:
    """An EngineCall of the channel. It is over when nobody holds it: neither who answers it nor an engine."""

    def __init__(
        self, metered: MeteredCall, peer: str, task: asyncio.Task[None] | None, over: Callable[["Call"], None]
    ) -> None:
        self.metered = metered
        self.peer = peer
        self.orphan = False  # nobody will settle it: its gateway's connection is gone
        self.ended_s: float | None = None
        self._task = task
        self._over = over
        self._holders = 1
        self._waiting: list[asyncio.Future[None]] = []

    def __repr__(self) -> str:
        return f"<Call of {self.peer or 'nobody'}: {self.metered!r}>"

    @property
    def used_us(self) -> int:
        """Its accelerator time up to the last step that ended."""
        return self.metered.used_us

    @property
    def queued_us(self) -> int:
        """How long it waited for the accelerator at first."""
        first_us = self.metered.first_us
        return 0 if first_us is None else max(0, first_us - self.metered.began_us)

    def hold(self) -> None:
        self._holders += 1

    def release(self) -> None:
        self._holders -= 1
        if not self._holders:
            self._over(self)
            for future in self._waiting:
                if not future.done():
                    future.set_result(None)

    def cancel(self) -> None:
        """Stop answering it, unless that is over or has been asked for already."""
        if self._task is not None and not self._task.cancelling():
            self._task.cancel()

    def answered(self) -> None:
        """Nobody answers it any more; an engine may be in the middle of a step for it."""
        self._task = None
        self.release()

    async def over(self) -> None:
        """Return once it has ended, the step in progress included."""
        if self.ended_s is None:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            await future


class StepsOf:
    """A StepMeter of one instance. Where several threads run steps of it (a whole engine, and a stage of a
    pipeline), they take turns, so that each step's time is its own."""

    def __init__(self, meter: GpuMeter, account: Account) -> None:
        self._meter = meter
        self._account = account
        self._turns = Turns()

    def began(self) -> None:
        self._turns.take()
        self._meter.step_began(self._account)

    def ended(self, work: Sequence[tuple[EngineCall, int]]) -> None:
        shares = [(call.metered, tokens) for call, tokens in work if isinstance(call, Call)]
        self._meter.step_ended(self._account, shares)
        self._turns.give()


class Calls:
    """Belongs to the event loop's thread. A call whose gateway cannot be told any more is lost: the
    node writes it to the ledger itself, once it is over, and still answers for it for a while."""

    def __init__(
        self,
        meter: GpuMeter,
        now_s: Callable[[], float],
        *,
        max_ended: int = MAX_ENDED,
        end_s: float = END_S,
    ) -> None:
        self._meter = meter
        self._now_s = now_s
        self._max_ended = max_ended
        self._end_s = end_s
        self._calls: dict[str, Call] = {}
        self._ended: dict[MeteredCall, Call] = {}  # in order of their ends
        self._missed: dict[str, None] = {}  # the oldest first

    def __repr__(self) -> str:
        return f"<Calls: {len(self._calls)} known, {len(self._ended)} of them over>"

    @contextmanager
    def begun(self, account: Account, call_id: str) -> Iterator[Call]:
        """A call that is being answered; it is remembered from here on."""
        self._supplant(call_id)
        task = asyncio.current_task()
        call = Call(self._meter.call_began(account, call_id), caller.get(), task, self._is_over)
        self._calls[call_id] = call
        try:
            yield call
        finally:
            call.answered()

    def joined(self, account: Account, call_id: str) -> Call:
        """A call that a stage of a pipeline runs something for, held until it is released. The one that is
        known, or else a new one, which is nobody's to settle but by name: its gateway speaks to others."""
        known = self._calls.get(call_id)
        if known is not None and known.metered.account is account and not known.orphan:
            known.hold()
            if known.ended_s is not None:  # it was over here, as it seemed
                known.ended_s = None
                del self._ended[known.metered]
            return known
        self._supplant(call_id)
        call = self._calls[call_id] = Call(self._meter.call_began(account, call_id), "", None, self._is_over)
        # Who asks for it has left already, and its record names no time of this node.
        call.orphan = call_id in self._missed
        return call

    @contextmanager
    def working(self, call: Call) -> Iterator[None]:
        """The call holds the accelerator, beside others of its instance; it is not over before the end."""
        call.hold()
        self._meter.working(call.metered)
        try:
            yield
        finally:
            self._meter.rested(call.metered)
            call.release()

    async def end(self, call_ids: Iterable[str]) -> dict[str, int]:
        """Cancel what runs of these, and tell what each known one used in all. Of one that cannot be
        stopped in time, what it used so far: the rest is lost once it is settled and over. So is all of one
        whose first step is still on its way here."""
        found: dict[str, Call] = {}
        for call_id in call_ids:
            if call_id in self._calls:
                found[call_id] = self._calls[call_id]
            else:
                self._missed[call_id] = None
        while len(self._missed) > MAX_MISSED:
            del self._missed[next(iter(self._missed))]
        for call in found.values():
            call.cancel()
        await self._all_over(found.values())
        for call in found.values():
            # Over before it is settled or not: what it goes on to use is in no record.
            call.orphan = call.orphan or call.ended_s is None
        self._meter.tick()
        return {call_id: call.used_us for call_id, call in found.items()}

    def settle(self, call_ids: Iterable[str]) -> None:
        """The ledger has these: forget them. What one that runs still is going to use is lost."""
        found = [self._calls[call_id] for call_id in call_ids if call_id in self._calls]
        for call in found:
            call.orphan = True
        self._forget(call for call in found if call.ended_s is not None)

    def peer_closed(self, peer: str) -> None:
        """A gateway's connection is gone, and with it whoever could be told of its calls."""
        orphans = [call for call in self._calls.values() if call.peer == peer]
        for call in orphans:
            call.orphan = True
        self._lose(orphans)

    async def close(self) -> None:
        """The node leaves: it will not be asked any more, so that all calls are lost. Returns when they are
        over; an answer that is not taken within `end_s` is cut."""
        calls = list(self._calls.values())
        for call in calls:
            call.orphan = True
        self._lose(calls)
        if not await self._all_over(calls):
            for call in calls:
                call.cancel()
            await self._all_over(calls)

    def expire(self) -> None:
        """Lose and forget the calls that no gateway has settled for long, so that they do not pile up."""
        old: list[Call] = []
        now_s = self._now_s()
        excess = len(self._ended) - self._max_ended
        for call in self._ended.values():
            if excess <= len(old) and call.ended_s is not None and now_s - call.ended_s < MAX_AGE_S:
                break
            old.append(call)
        unsettled = [call for call in old if not call.metered.lost]
        if unsettled:
            log.warning("%d calls were never settled by their gateway", len(unsettled))
        self._lose(old)
        self._forget(old)

    async def _all_over(self, calls: Iterable[Call]) -> bool:
        """Whether these end within `end_s`."""
        try:
            async with asyncio.timeout(self._end_s):
                for call in calls:
                    await call.over()
        except TimeoutError:
            return False
        return True

    def _supplant(self, call_id: str) -> None:
        """The id is going to be another call's: nobody can settle the one that has it."""
        before = self._calls.get(call_id)
        if before is not None:
            before.orphan = True
            self._lose([before])

    def _is_over(self, call: Call) -> None:
        call.ended_s = self._now_s()
        self._ended[call.metered] = call
        if call.orphan:
            self._lose([call])

    def _lose(self, calls: Iterable[Call]) -> None:
        over = [call.metered for call in calls if call.ended_s is not None]
        if over:
            self._meter.lose(over)

    def _forget(self, calls: Iterable[Call]) -> None:
        calls = list(calls)
        for call in calls:
            self._ended.pop(call.metered, None)
            if self._calls.get(call.metered.call_id) is call:
                del self._calls[call.metered.call_id]
        if calls:
            self._meter.forget([call.metered for call in calls])


async def keep_metering(meter: GpuMeter, calls: Calls, interval_s: float) -> None:
    """Write down time as it goes by, and end an instance's interval after `interval_s`; never returns."""
    while True:
        await asyncio.sleep(min(TICK_S, interval_s))
        meter.tick()
        meter.cut(older_than_us=round(interval_s * 1e6))
        calls.expire()
