"""What a node reports of the accelerator's time to the ledger and the gateways."""

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from invoker.lifetime import EXIT_HANGING
from invoker.metering.journal import recover_journals
from invoker.metering.meter import GpuMeter
from invoker.watchdog import watch_steps
from registry.channel.client import Channel
from registry.errors import StateUnavailable
from registry.memory.state import MemoryState
from registry.messages.node import (
    Acknowledged,
    CallsUsed,
    EndCalls,
    HandlerChunk,
    InvokeHandler,
    Reply,
    RequestUsage,
    SettleCalls,
    StopInstance,
    Tokens,
)
from registry.records.instance import InstanceState
from registry.records.node import NodeRecord
from registry.records.usage import InstanceInterval, LostCall
from tests.fixtures.fake_engine import StepGate
from tests.fixtures.invoker import (
    KIB,
    SECRET,
    FakeCluster,
    FakeEngines,
    FakeNode,
    generate,
    make_image,
    serving,
    start_request,
)
from tests.fixtures.patience import PATIENCE_S

SIZE = 1024 * KIB


class Watched(MemoryState):
    """A state whose ledger can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.away = False
        self._grown = asyncio.Condition()

    async def put_node(self, record: NodeRecord, ttl_s: float) -> None:
        if self.away:
            raise StateUnavailable("away")
        await super().put_node(record, ttl_s)

    async def add_interval(self, interval: InstanceInterval) -> bool:
        if self.away:
            raise StateUnavailable("away")
        return await self._told(await super().add_interval(interval))

    async def add_lost_call(self, lost: LostCall) -> bool:
        return await self._told(await super().add_lost_call(lost))

    async def ready_intervals(self, count: int) -> list[InstanceInterval]:
        """All intervals, once so many are of ready instances."""
        async with self._grown:
            while sum(one.state == "ready" for one in await self.intervals()) < count:
                await self._grown.wait()
        return await self.intervals()

    async def lost(self, count: int) -> list[LostCall]:
        """Wait for that many lost calls, and return them."""
        async with self._grown:
            while len(await self.lost_calls()) < count:
                await self._grown.wait()
        return await self.lost_calls()

    async def _told(self, added: bool) -> bool:
        async with self._grown:
            self._grown.notify_all()
        return added


def watched(folder: Path) -> tuple[FakeCluster, Watched]:
    cluster, state = FakeCluster(folder), Watched()
    cluster.state = state
    return cluster, state


def usage(replies: Sequence[Reply]) -> RequestUsage:
    last = replies[-1]
    found = last.usage if isinstance(last, HandlerChunk) else last
    assert isinstance(found, RequestUsage)
    return found


async def used(node: FakeNode, *ids: str) -> dict[str, int]:
    (answer,) = await node.ask(EndCalls(request_ids=ids))
    assert isinstance(answer, CallsUsed)
    return answer.gpu_us


def busy(intervals: Sequence[InstanceInterval]) -> int:
    return sum(one.busy_us for one in intervals)


def unbroken(intervals: Sequence[InstanceInterval]) -> bool:
    """Whether intervals of the only instance of a node follow each other, each full of its time."""
    follow = all(one.to_at == other.from_at for one, other in pairwise(intervals))
    return follow and all(abs(one.allocated_us - (one.to_at - one.from_at) * 1e6) < 10 for one in intervals)


async def test_intervals_add_up_to_what_the_calls_used(tmp_path: Path) -> None:
    image = make_image("a", SIZE)
    cluster, state = watched(tmp_path)
    async with cluster:
        async with cluster.node("n0", "h0", "--meter-interval", "100ms") as node:
            await cluster.put(image)
            await node.ask(start_request("i1", image))
            asked = [node.ask(generate("i1", f"r{number}/0", 50)) for number in range(4)]
            usages = [usage(replies) for replies in await asyncio.gather(*asked)]
            await state.ready_intervals(2)
            counters = (await node.record()).counters
        intervals = await state.intervals()
        total = sum(one.gpu_us for one in usages)
        assert busy(intervals) == total == counters["busy_us"] > 0 and unbroken(intervals)
        assert sum(one.loading_us for one in intervals) == counters["loading_us"] > 0
        assert {one.state for one in intervals if one.loading_us} <= {"starting", "loading"}
        # Nobody settled the calls: the node has said at its end what they used.
        lost = await state.lost_calls()
        assert sum(one.used_us for one in lost) == total
        assert {one.call_id for one in lost} == {f"r{number}/0" for number in range(4)}
    assert not cluster.shm.exists()


async def test_a_call_that_is_cut_short_is_told_to_the_last_step(tmp_path: Path) -> None:
    image, gate = make_image("a", SIZE), StepGate()
    cluster, state = watched(tmp_path)
    async with cluster:
        async with cluster.node("n0", "h0", engines=FakeEngines(gate=gate)) as node:
            await cluster.put(image)
            await node.ask(start_request("i1", image))
            async with node.channel.call(generate("i1", "r/0", 1000)) as call:
                gate.release()
                first = await anext(aiter(call))
            assert isinstance(first, Tokens)
            # The CANCEL frame has gone ahead of this; a step waits at the gate meanwhile.
            ending = asyncio.create_task(used(node, "r/0", "unknown/0"))
            asking = asyncio.create_task(used(node, "r/0"))
            assert await used(node) == {}
            assert not ending.done() and not asking.done()
            gate.release()
            (reported,) = (await ending).values()
            assert reported >= first.gpu_us  # on a slow machine the next step had not started
            assert await asking == {"r/0": reported}
            assert await node.ask(SettleCalls(request_ids=("r/0", "unknown/0"))) == [Acknowledged()]
            assert await used(node, "r/0") == {}
            gate.open()
        assert busy(await state.intervals()) == reported
        assert await state.lost_calls() == []


async def test_a_call_that_runs_is_ended_when_that_is_asked(tmp_path: Path) -> None:
    async with serving(tmp_path, SIZE) as node:
        async with node.channel.call(generate("i1", "r/0", 100_000)) as call:
            await anext(aiter(call))
            assert (await used(node, "r/0"))["r/0"] > 0
        await node.ask(StopInstance(instance_id="i1", grace_s=60.0))


async def test_a_step_that_hangs_is_given_up_but_not_one_that_is_late() -> None:
    given_up, now_us = asyncio.Event(), [0]
    meter = GpuMeter("n0", 1, lambda: now_us[0], 0.0)
    account = meter.open_account("i1", "f", 1, InstanceState.READY)
    looks: list[int] = []

    def longest_step_us() -> int:
        """Return the meter's value; each look advances the clock, and the first step ends late."""
        now_us[0] += 15_000
        found = meter.longest_step_us()
        looks.append(found)
        if found > 20_000 and len(looks) < 4:
            meter.end_step(account, [])
            meter.start_step(account)
        return found

    async def give_up() -> None:
        given_up.set()

    meter.start_step(account)
    await watch_steps(longest_step_us, 0.02, give_up)
    assert given_up.is_set() and looks == [15_000, 30_000, 15_000, 30_000, 45_000]


HANGING = """
import asyncio, pathlib, sys
from tests.fixtures.fake_engine import StepGate
from tests.fixtures.invoker import FakeCluster, FakeEngines, generate, make_image, start_request

async def main():
    image = make_image("a", 65536)
    async with FakeCluster(pathlib.Path(sys.argv[1])) as cluster:
        flags = ("--step-timeout", "200ms", "--journal-dir", sys.argv[2])
        async with cluster.node("n0", "h0", *flags, engines=FakeEngines(gate=StepGate())) as node:
            await cluster.put(image)
            await node.ask(start_request("i1", image))
            print(cluster.shm, flush=True)
            await node.ask(generate("i1"))

asyncio.run(main())
"""


def test_a_process_whose_engine_hangs_ends_itself_and_leaves_its_journal(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HANGING, str(tmp_path / "store"), str(tmp_path / "journals")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == EXIT_HANGING, done.stderr
    shm = Path(done.stdout.strip())
    assert shm.is_absolute()  # an empty answer would be this very folder
    shutil.rmtree(shm, ignore_errors=True)
    shm.parent.rmdir()
    assert "engine hangs" in done.stderr
    (adopted,) = recover_journals(tmp_path / "journals" / shm.name)
    os.close(adopted.fd)
    states = [one.state for one in adopted.records if isinstance(one, InstanceInterval)]
    assert states[-1] == "ready" and len(states) == len(adopted.records)


async def test_calls_of_a_gateway_that_is_gone_are_lost_but_still_answered_for(tmp_path: Path) -> None:
    image, gate = make_image("a", SIZE), StepGate()
    cluster, state = watched(tmp_path)
    async with cluster:
        async with cluster.node("n0", "h0", engines=FakeEngines(gate=gate)) as node:
            await cluster.put(image)
            await node.ask(start_request("i1", image))
            gateway = await Channel.connect((await node.record()).channel, SECRET.encode())
            async with gateway.call(generate("i1", "settled/0", 3)) as call:
                gate.release(3)
                settled = usage([reply async for reply in call])
            async with gateway.call(SettleCalls(request_ids=("settled/0",))) as call:
                assert [reply async for reply in call] == [Acknowledged()]
            async with gateway.call(generate("i1", "reported/0", 3)) as call:
                gate.release(3)
                reported = usage([reply async for reply in call])
            async with gateway.call(generate("i1", "cut/0", 1000)) as call:
                gate.release()
                await anext(aiter(call))
                await gateway.aclose()
            gate.open()
            lost = await state.lost(2)
            figures = await used(node, "settled/0", "reported/0", "cut/0")
            assert figures == {one.call_id: one.used_us for one in lost}
            assert figures["reported/0"] == reported.gpu_us and figures["cut/0"] > 0
        assert await state.lost_calls() == lost
        total = busy(await state.intervals())
        assert total == settled.gpu_us + sum(figures.values())


async def test_what_a_node_could_not_tell_before_it_left_comes_with_the_next_of_its_host(
    tmp_path: Path,
) -> None:
    image = make_image("a", SIZE)
    cluster, state = watched(tmp_path)
    flags = ("--meter-interval", "100ms", "--journal-dir", str(tmp_path / "journals"))
    async with cluster:
        async with cluster.node("n0", "h0", *flags) as node:
            await cluster.put(image)
            await node.ask(start_request("i1", image))
            before = await state.ready_intervals(1)
            state.away = True
            spent = usage(await node.ask(generate("i1", "r/0", 20))).gpu_us
        assert await state.lost_calls() == [] and busy(await state.intervals()) == 0
        state.away = False
        journals = tmp_path / "journals" / f"hypercast-{cluster.id}"
        assert [path.name for path in journals.iterdir()] == ["n0.1.journal"]
        async with cluster.node("n1", "h0", *flags):
            await state.lost(1)
        intervals = await state.intervals()
        assert intervals[: len(before)] == before and unbroken(intervals)
        assert [one.state for one in intervals[-2:]] == ["ready", "draining"]
        assert busy(intervals) == spent and {one.node for one in intervals} == {"n0"}
        assert not journals.exists()


async def test_a_handler_that_computes_on_after_its_caller_left_is_metered_until_its_end(
    tmp_path: Path,
) -> None:
    source = """
import threading
started, going = threading.Event(), threading.Event()
def handle(request):
    if request == "work":
        started.set()
        return going.wait(60)
    if request == "go":
        going.set()
    return started.wait(60)
"""
    files = {"function.yaml": b"name: f\nhandler: handler.py:handle\n", "handler.py": source.encode()}

    def ask(call_id: str, body: bytes) -> InvokeHandler:
        return InvokeHandler(request_id=call_id, instance_id="i1", body=body)

    cluster, state = watched(tmp_path)
    async with cluster:
        async with cluster.node("n0", "h0", "--allow-handlers", "--allow-unconfined-handlers") as node:
            await node.ask(start_request("i1", None, task="handler", assets=files))
            leaving = asyncio.create_task(node.ask(ask("r1/0", b'"work"')))
            others = [usage(await node.ask(ask("r2/0", b'"started"')))]
            leaving.cancel()
            await asyncio.wait([leaving])
            reported = asyncio.create_task(used(node, "r1/0"))
            others.append(usage(await node.ask(ask("r3/0", b'"started"'))))
            assert not reported.done()
            others.append(usage(await node.ask(ask("r4/0", b'"go"'))))
            figure = (await reported)["r1/0"]
            assert figure > sum(one.gpu_us for one in others) / 2
            await node.ask(SettleCalls(request_ids=("r1/0", "r2/0", "r3/0", "r4/0")))
        assert busy(await state.intervals()) == figure + sum(one.gpu_us for one in others)
        assert await state.lost_calls() == []
