"""Divides the time in which a child process runs calls among them, by the tokens of each interval."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress

from invoker.engine.contract import EngineCall, StepMeter
from rdmacast.aio.groups import cancel_and_wait
from rdmacast.aio.threads import run_in_thread

INTERVAL_S = 0.1


def shares_of(tokens: Mapping[EngineCall, int | None]) -> list[tuple[EngineCall, int]]:
    """Return the weights of calls in an interval, by their tokens in it; of None they are not known.

    A call without a token that is known to have none weighs nothing, unless no call has any. One whose tokens
    are not known weighs as much as the others do on average, at least one token.
    """
    known = [count for count in tokens.values() if count is not None]
    average = max(1, round(sum(known) / len(known))) if known else 1
    weights = [(call, average if count is None else count) for call, count in tokens.items()]
    if any(weight for _, weight in weights):
        return weights
    return [(call, 1) for call, _ in weights]


class TokenIntervals:
    """The calls that a child process runs, metered as steps that follow each other while there are any.

    A step ends after INTERVAL_S, or when a call leaves. Belongs to the event loop's thread; the meter's
    methods run in threads, as they may wait for the step of another engine.
    """

    def __init__(self, meter: StepMeter) -> None:
        self._meter = meter
        self._tokens: dict[EngineCall, int | None] = {}
        self._entered = asyncio.Event()
        self._cut = asyncio.Event()
        self._leaving: dict[EngineCall, asyncio.Future[None]] = {}  # at the end of the step
        self._task = asyncio.create_task(self._run(), name="token intervals")

    def __repr__(self) -> str:
        return f"<TokenIntervals {len(self._tokens)} calls>"

    def enter(self, call: EngineCall, *, counts: bool = True) -> None:
        """Meter a call from now on; without `counts` its tokens are not known until its end."""
        call.hold()
        self._tokens[call] = 0 if counts else None
        self._entered.set()

    def add(self, call: EngineCall, tokens: int) -> None:
        """Count tokens of a call that have been run since the last time."""
        counted = self._tokens.get(call)
        if counted is not None:
            self._tokens[call] = counted + tokens

    async def leave(self, call: EngineCall) -> None:
        """Return once all that was run for the call has been metered."""
        if call not in self._tokens:
            return
        if self._task.done():  # nothing is metered any more
            self._release((call,))
            return
        if call not in self._leaving:
            self._leaving[call] = asyncio.get_running_loop().create_future()
            self._cut.set()
        await asyncio.shield(self._leaving[call])

    async def aclose(self) -> None:
        """End the metering; calls that are still here are released."""
        await cancel_and_wait(self._task)
        self._release(tuple(self._tokens))

    async def _run(self) -> None:
        while True:
            await self._entered.wait()
            while self._tokens:
                await run_in_thread(self._meter.start_step, undo=lambda _: self._meter.end_step(()))
                try:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(INTERVAL_S):
                            await self._cut.wait()
                finally:
                    self._meter.end_step(shares_of(self._tokens))
                for call, count in self._tokens.items():
                    self._tokens[call] = None if count is None else 0
                self._cut.clear()
                self._release(tuple(self._leaving))
            self._entered.clear()

    def _release(self, calls: Sequence[EngineCall]) -> None:
        for call in calls:
            del self._tokens[call]
            call.release()
            ended = self._leaving.pop(call, None)
            if ended is not None and not ended.done():
                ended.set_result(None)
