"""The calls of this node, kept until the gateway reports that they are in the ledger."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

from invoker.engine.contract import EngineCall
from invoker.instances.fair_lock import FairLock
from invoker.metering.accounts import MeterAccount, MeteredCall
from invoker.metering.meter import GpuMeter
from registry.channel.server import caller

MAX_ENDED = 100_000  # ended calls; a gateway settles within a second
MAX_MISSED = 4096  # ids that a gateway ended before their first step here
MAX_AGE_S = 900.0
TICK_S = 1.0
END_S = 2.0  # a gateway's timeout for the usage of cancelled calls is a little longer

log = logging.getLogger("invoker.calls")


class HeldCall:
    """An EngineCall of the channel, reference-counted: it ends when neither handler nor engine holds it.

    A context manager of its handler, which finishes it.
    """

    __slots__ = ("_holders", "_on_end", "_task", "_waiters", "ended_s", "metered", "orphan", "peer")

    def __init__(
        self,
        metered: MeteredCall,
        peer: str,
        task: asyncio.Task[None] | None,
        on_end: Callable[["HeldCall"], None],
    ) -> None:
        self.metered = metered
        self.peer = peer
        self.orphan = False  # its gateway's connection is lost: it will not be settled
        self.ended_s: float | None = None
        self._task = task
        self._on_end = on_end
        self._holders = 1
        self._waiters: list[asyncio.Future[None]] = []

    def __repr__(self) -> str:
        return f"<HeldCall of {self.peer or 'no peer'}: {self.metered!r}>"

    def __enter__(self) -> "HeldCall":
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    @property
    def used_us(self) -> int:
        """Return its accelerator time up to the last completed step."""
        return self.metered.used_us

    @property
    def queued_us(self) -> int:
        """Return its wait for the accelerator before its first step."""
        first_us = self.metered.first_us
        return 0 if first_us is None else max(0, first_us - self.metered.opened_us)

    def hold(self) -> None:
        self._holders += 1

    def release(self) -> None:
        self._holders -= 1
        if not self._holders:
            self._on_end(self)
            for future in self._waiters:
                if not future.done():
                    future.set_result(None)

    def cancel(self) -> None:
        """Cancel the task that handles it, if it has one that is not being cancelled."""
        if self._task is not None and not self._task.cancelling():
            self._task.cancel()

    def finish(self) -> None:
        """Release the handler's reference; an engine may hold the call until its step ends."""
        self._task = None
        self.release()

    async def wait_ended(self) -> None:
        """Wait until it has ended, including the current step."""
        if self.ended_s is None:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(future)
            await future


class InstanceSteps:
    """A StepMeter of one instance.

    Its threads (an engine's and a stage's) run steps one at a time, so that a step's duration is its own.
    """

    def __init__(self, meter: GpuMeter, account: MeterAccount) -> None:
        self._meter = meter
        self._account = account
        self._lock = FairLock()

    def start_step(self) -> None:
        self._lock.acquire()
        self._meter.start_step(self._account)

    def end_step(self, work: Sequence[tuple[EngineCall, int]]) -> None:
        shares = [(call.metered, tokens) for call, tokens in work if isinstance(call, HeldCall)]
        self._meter.end_step(self._account, shares)
        self._lock.release()


class Calls:
    """The calls of this node. Belongs to the event loop's thread.

    A call whose gateway is lost is recorded in the ledger by the node itself once it has ended.
    """

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
        self._calls: dict[str, HeldCall] = {}
        self._ended: dict[MeteredCall, HeldCall] = {}  # in order of their ends
        self._missed: dict[str, None] = {}  # the oldest first

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    def __repr__(self) -> str:
        return f"<Calls: {len(self._calls)} calls, {len(self._ended)} of them ended>"

    def open(self, account: MeterAccount, call_id: str) -> HeldCall:
        """Open a call that is handled until its `finish`, by this task; it is kept until settled."""
        self._orphan_previous(call_id)
        task = asyncio.current_task(self._loop)
        call = HeldCall(self._meter.open_call(account, call_id), caller.get(), task, self._on_call_end)
        self._calls[call_id] = call
        return call

    def join(self, account: MeterAccount, call_id: str) -> HeldCall:
        """Hold a call that a stage runs steps for, until its release.

        A new one, opened if the call is unknown here, belongs to no peer: its gateway settles it by id.
        """
        known = self._calls.get(call_id)
        if known is not None and known.metered.account is account and not known.orphan:
            known.hold()
            if known.ended_s is not None:  # it seemed to have ended here
                known.ended_s = None
                del self._ended[known.metered]
            return known
        self._orphan_previous(call_id)
        call = self._calls[call_id] = HeldCall(
            self._meter.open_call(account, call_id), "", None, self._on_call_end
        )
        # The gateway has ended it already, so its record contains no time of this node.
        call.orphan = call_id in self._missed
        return call

    def occupy(self, call: HeldCall) -> None:
        """Charge the call for the accelerator until `vacate`, shared by its instance's calls."""
        call.hold()
        self._meter.occupy(call.metered)

    def vacate(self, call: HeldCall) -> None:
        """Stop charging the call for the accelerator."""
        self._meter.vacate(call.metered)
        call.release()

    async def end(self, call_ids: Iterable[str]) -> dict[str, int]:
        """Cancel calls and return each known one's accelerator time.

        Time used after END_S by a call that could not be stopped is recorded as lost; so is all time of a
        call whose first step has not arrived here yet.
        """
        found: dict[str, HeldCall] = {}
        for call_id in call_ids:
            if call_id in self._calls:
                found[call_id] = self._calls[call_id]
            else:
                self._missed[call_id] = None
        while len(self._missed) > MAX_MISSED:
            del self._missed[next(iter(self._missed))]
        for call in found.values():
            call.cancel()
        await self._wait_all_ended(found.values())
        for call in found.values():
            # Whether it ends before it is settled or not: its further time is in no record.
            call.orphan = call.orphan or call.ended_s is None
        self._meter.tick()
        return {call_id: call.used_us for call_id, call in found.items()}

    def settle(self, call_ids: Iterable[str]) -> None:
        """Forget calls that are in the ledger; further time of those still running is recorded as lost."""
        found = [self._calls[call_id] for call_id in call_ids if call_id in self._calls]
        for call in found:
            call.orphan = True
        self._forget(call for call in found if call.ended_s is not None)

    def peer_closed(self, peer: str) -> None:
        """Record the calls of a gateway whose connection is lost."""
        orphans = [call for call in self._calls.values() if call.peer == peer]
        for call in orphans:
            call.orphan = True
        self._record_lost(orphans)

    async def close(self) -> None:
        """Record all calls as lost, since the node leaves, and wait until they have ended.

        Handlers still running after `end_s` are cancelled.
        """
        calls = list(self._calls.values())
        for call in calls:
            call.orphan = True
        self._record_lost(calls)
        if not await self._wait_all_ended(calls):
            for call in calls:
                call.cancel()
            await self._wait_all_ended(calls)

    def expire(self) -> None:
        """Record and forget calls that no gateway has settled within MAX_AGE_S, or beyond `max_ended`."""
        old: list[HeldCall] = []
        now_s = self._now_s()
        excess = len(self._ended) - self._max_ended
        for call in self._ended.values():
            if excess <= len(old) and call.ended_s is not None and now_s - call.ended_s < MAX_AGE_S:
                break
            old.append(call)
        unsettled = [call for call in old if not call.metered.lost]
        if unsettled:
            log.warning("%d calls were not settled by their gateway", len(unsettled))
        self._record_lost(old)
        self._forget(old)

    async def _wait_all_ended(self, calls: Iterable[HeldCall]) -> bool:
        """Wait until these have ended; return False after `end_s`."""
        try:
            async with asyncio.timeout(self._end_s):
                for call in calls:
                    await call.wait_ended()
        except TimeoutError:
            return False
        return True

    def _orphan_previous(self, call_id: str) -> None:
        """Orphan a call whose id is about to be reused: it can no longer be settled."""
        before = self._calls.get(call_id)
        if before is not None:
            before.orphan = True
            self._record_lost([before])

    def _on_call_end(self, call: HeldCall) -> None:
        call.ended_s = self._now_s()
        self._ended[call.metered] = call
        if call.orphan:
            self._record_lost([call])

    def _record_lost(self, calls: Iterable[HeldCall]) -> None:
        ended = [call.metered for call in calls if call.ended_s is not None]
        if ended:
            self._meter.record_lost(ended)

    def _forget(self, calls: Iterable[HeldCall]) -> None:
        calls = list(calls)
        for call in calls:
            self._ended.pop(call.metered, None)
            if self._calls.get(call.metered.call_id) is call:
                del self._calls[call.metered.call_id]
        if calls:
            self._meter.close_calls([call.metered for call in calls])


async def keep_metering(meter: GpuMeter, calls: Calls, interval_s: float) -> None:
    """Journal elapsed time, and end instances' intervals every `interval_s`; never returns."""
    while True:
        await asyncio.sleep(min(TICK_S, interval_s))
        meter.tick()
        meter.end_intervals(older_than_us=round(interval_s * 1e6))
        calls.expire()
