"""The calls that a node remembers: until they are settled, lost, or too many or too old."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from invoker.instances.calls import MAX_AGE_S, Calls, HeldCall
from invoker.metering.accounts import LedgerRecord, MeterAccount
from invoker.metering.meter import MAX_UNSENT, GpuMeter
from registry.clock import FakeClock
from registry.records.instance import InstanceState
from registry.records.usage import InstanceInterval, LostCall
from tests.fixtures.meter import paid


class Node:
    """A meter and its calls, on a clock that stands still."""

    def __init__(self, max_ended: int = 1000, end_s: float = 10.0) -> None:
        self.clock = FakeClock()
        self.meter = GpuMeter("n0", 1, lambda: round(self.clock.monotonic_s() * 1e6), 0.0)
        self.calls = Calls(self.meter, self.clock.monotonic_s, max_ended=max_ended, end_s=end_s)
        self.account: MeterAccount = self.meter.open_account("i1", "f", 1, InstanceState.READY)

    def run(self, call_id: str, seconds: float) -> None:
        with self.calls.open(self.account, call_id) as call, self.occupying(call):
            self.clock.advance(seconds)

    @contextmanager
    def occupying(self, call: HeldCall) -> Iterator[None]:
        self.calls.occupy(call)
        try:
            yield
        finally:
            self.calls.vacate(call)

    def due(self) -> list[LedgerRecord]:
        return list(paid(self.meter))

    def lost(self) -> dict[str, int]:
        return {one.call_id: one.used_us for one in self.due() if isinstance(one, LostCall)}


async def test_calls_that_nobody_settles_are_lost_in_the_end() -> None:
    node = Node(max_ended=3)
    node.run("old", 1.0)
    node.clock.advance(MAX_AGE_S - 1)
    for number in range(3):
        node.run(f"new{number}", 0.5)
    node.calls.expire()
    assert node.lost() == {"old": 1_000_000}
    assert "3 calls" in repr(node.calls)
    for number in range(3, 5):
        node.run(f"new{number}", 0.5)
    node.calls.expire()
    assert node.lost() == {"new0": 500_000, "new1": 500_000}
    assert await node.calls.end(["old", "new0", "new2"]) == {"new2": 500_000}
    node.calls.settle(["new2", "new3", "nobody"])
    await node.calls.close()
    assert node.lost() == {"new4": 500_000}
    assert node.account.busy == node.account.settled_us + 500_000


async def test_what_a_call_uses_after_it_was_settled_is_lost() -> None:
    node = Node()
    with node.calls.open(node.account, "a") as call:
        call.hold()  # as an engine does
    asked = asyncio.create_task(node.calls.end(["a"]))
    await asyncio.sleep(0)
    node.calls.settle(["a"])
    node.meter.start_step(node.account)
    node.clock.advance(2.0)
    node.meter.end_step(node.account, [(call.metered, 7)])
    assert node.lost() == {}
    call.release()
    assert await asked == {"a": 2_000_000} and node.lost() == {"a": 2_000_000}
    assert call.queued_us == 0


async def test_a_name_that_is_used_twice_is_two_calls() -> None:
    node = Node()
    node.run("a", 1.0)
    node.run("a", 2.0)
    assert node.lost() == {"a": 1_000_000}
    assert await node.calls.end(["a"]) == {"a": 2_000_000}


def test_records_that_the_ledger_never_takes_are_dropped_with_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    node = Node()
    with caplog.at_level(logging.ERROR):
        for _ in range(MAX_UNSENT + 2):
            node.clock.advance(0.001)
            node.meter.end_intervals()
    assert caplog.text.count(": dropped ") == 2
    found = node.due()
    assert len(found) == MAX_UNSENT and isinstance(found[0], InstanceInterval)
    assert found[0].idle_us == 1000 and found[0].from_at == pytest.approx(0.002)


async def test_what_a_call_uses_after_its_last_figure_is_lost() -> None:
    node = Node(end_s=0.01)
    held = ExitStack()
    with node.calls.open(node.account, "r1/0") as call:
        held.enter_context(node.occupying(call))
        node.clock.advance(1.0)
    node.clock.advance(2.0)  # nobody waits for it, but it cannot be stopped
    assert await node.calls.end(["r1/0"]) == {"r1/0": 3_000_000}
    node.calls.settle(["r1/0"])
    node.clock.advance(4.0)
    assert node.lost() == {}
    held.close()
    assert node.lost() == {"r1/0": 7_000_000}  # of which the record has the first three seconds
    node.clock.advance(1.0)
    assert node.account.busy == 7_000_000


async def test_what_a_stage_runs_for_a_call_that_was_asked_for_before_is_lost() -> None:
    node = Node()
    assert await node.calls.end(["r1"]) == {}  # its first step is on its way here
    for call_id in ("r1", "r2"):
        call = node.calls.join(node.account, call_id)
        with node.occupying(call):
            node.clock.advance(1.0)
        call.release()
    assert node.lost() == {"r1": 1_000_000}
    assert await node.calls.end(["r2"]) == {"r2": 1_000_000}
    node.calls.settle(["r2"])
    await node.calls.close()
    assert node.lost() == {}


async def test_a_node_that_leaves_waits_for_calls_that_are_about_to_end_and_loses_them() -> None:
    node = Node(end_s=0.05)
    ending = asyncio.Event()

    async def answer(call_id: str, until: asyncio.Event) -> None:
        with node.calls.open(node.account, call_id) as call:
            with node.occupying(call):
                node.clock.advance(1.0)
            await until.wait()

    answers = [
        asyncio.create_task(answer("ending", ending)),
        asyncio.create_task(answer("stuck", asyncio.Event())),
    ]
    await asyncio.sleep(0)
    closing = asyncio.create_task(node.calls.close())
    await asyncio.sleep(0)
    ending.set()
    await closing
    assert node.lost() == {"ending": 1_000_000, "stuck": 1_000_000}
    await asyncio.wait(answers)
