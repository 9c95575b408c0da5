"""The time of calls in a child process: all of it is divided, by the tokens of each interval."""

import asyncio
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from invoker.engine.contract import EngineCall
from invoker.vllm.intervals import TokenIntervals, shares_of
from tests.fixtures.fake_engine import HeldCall
from tests.fixtures.patience import PATIENCE_S, until


class _Meter:
    def __init__(self) -> None:
        self.steps: list[list[tuple[EngineCall, int]]] = []
        self.stepping = False
        self.started = asyncio.Event()

    def start_step(self) -> None:
        assert not self.stepping
        self.stepping = True

    def end_step(self, work: Sequence[tuple[EngineCall, int]]) -> None:
        assert self.stepping
        self.stepping = False
        self.steps.append(list(work))


@given(st.lists(st.one_of(st.none(), st.integers(0, 100)), min_size=1, max_size=8))
def test_some_call_pays_for_each_interval(counts: list[int | None]) -> None:
    calls = [HeldCall() for _ in counts]
    shares = shares_of(dict(zip(calls, counts, strict=True)))
    assert [call for call, _ in shares] == calls and sum(weight for _, weight in shares) > 0
    known = [count for count in counts if count is not None]
    for (_, weight), count in zip(shares, counts, strict=True):
        if count is not None and any(known):
            assert weight == count
        if count is None:
            assert weight >= 1


async def test_a_call_is_metered_until_it_has_left() -> None:
    meter, one, other = _Meter(), HeldCall(), HeldCall()
    intervals = TokenIntervals(meter)
    intervals.enter(one)
    intervals.enter(other)
    intervals.add(one, 30)
    intervals.add(other, 10)
    async with asyncio.timeout(PATIENCE_S):
        await intervals.leave(one)
    assert one.held == 0 and other.held == 1
    tokens = {id(call): sum(n for step in meter.steps for c, n in step if c is call) for call in (one, other)}
    assert tokens[id(one)] == 30 and tokens[id(other)] >= 10
    intervals.add(one, 5)  # it has left
    await intervals.leave(one)
    await intervals.aclose()
    assert other.held == 0 and not meter.stepping


async def test_a_cancelled_caller_leaves_all_the_same() -> None:
    meter, call = _Meter(), HeldCall()
    intervals = TokenIntervals(meter)
    intervals.enter(call, counts=False)
    leaving = asyncio.create_task(intervals.leave(call))
    await asyncio.sleep(0)
    leaving.cancel()
    async with asyncio.timeout(PATIENCE_S):
        await intervals.leave(call)
    assert call.held == 0 and meter.steps[-1] == [(call, 1)]
    await intervals.aclose()


async def test_steps_end_while_calls_run() -> None:
    meter, call = _Meter(), HeldCall()
    intervals = TokenIntervals(meter)
    intervals.enter(call)
    await until(lambda: len(meter.steps) >= 3)
    await intervals.aclose()
    assert call.held == 0


async def test_a_call_leaves_after_the_end_of_the_metering() -> None:
    meter, call = _Meter(), HeldCall()
    intervals = TokenIntervals(meter)
    await intervals.aclose()
    intervals.enter(call)
    async with asyncio.timeout(PATIENCE_S):
        await intervals.leave(call)
    assert call.held == 0 and not meter.steps
