"""Loads that are shared, watched and left; and what is told to the shared state meanwhile."""

import asyncio
import fcntl
import gc
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from invoker.counters import Counters
from invoker.engine.contract import TokenOutput
from invoker.errors import StartFailed
from invoker.fetch import Target, from_peers
from invoker.filling import Filling
from invoker.host_tier import HostTier
from invoker.log_rings import LogRings
from invoker.meter import GpuMeter
from invoker.publisher import Publisher
from invoker.scratch import scratch_folder
from invoker.serving import batches, decode_array, encode_array
from invoker.threads import in_own_thread, in_thread
from invoker.together import together
from rdmacast.connector import Connector
from rdmacast.errors import NoHolder
from rdmacast.memory_transport import MemoryNetwork, MemoryTransport
from rdmacast.region import GrowingRegion
from rdmacast.transport import PeerAddress
from registry.clock import FakeClock
from registry.errors import RemoteError, StateUnavailable
from registry.instance import InstanceRecord, InstanceState, StartKind
from registry.memory_state import MemoryState
from registry.messages import Done, DropImage, InstanceProgress, InstanceStarted, WarmImage
from registry.node import NodeRecord, NodeState
from tests.invoker_fixture import FakeCluster, make_image, start_request
from tests.patience import PATIENCE_S

SLOW = ("--link-rate", "8mbit")


def test_a_load_goes_on_while_somebody_wants_it_and_ends_when_nobody_does(tmp_path: Path) -> None:
    async def scenario() -> None:
        image = make_image("a", 2 << 20)
        async with (
            FakeCluster(tmp_path) as cluster,
            cluster.node("n0", "h0") as first,
            cluster.node("n1", "h1", *SLOW) as second,
        ):
            await cluster.put(image)
            await first.ask(WarmImage(image=image.ref()))
            request = WarmImage(image=image.ref(await first.holder()))
            folder = cluster.shm / "h1"
            async with second.channel.call(request) as one, second.channel.call(request) as two:
                ones, twos = aiter(one), aiter(two)
                fractions = [(await anext(ones)).fraction, (await anext(twos)).fraction]
                await one.__aexit__(None, None, None)
                async for reply in twos:
                    assert isinstance(reply, InstanceProgress)
                    fractions.append(reply.fraction)
                    if len(fractions) > 3:
                        break
                assert fractions[2:] == sorted(fractions[2:]) and fractions[-1] < 1.0
                assert (folder / f"{image.digest}.part").exists()
            while (folder / f"{image.digest}.part").exists():
                await second.record()
            record = await second.record()
            assert record.host_free_bytes == record.host_bytes and record.holdings == ()
            assert record.counters["disk_read_bytes"] == 0

    asyncio.run(scenario())


def test_a_third_host_reads_from_one_that_is_still_loading(tmp_path: Path) -> None:
    async def scenario() -> None:
        image = make_image("a", 1 << 20)
        async with (
            FakeCluster(tmp_path) as cluster,
            cluster.node("n0", "h0") as first,
            cluster.node("n1", "h1", *SLOW) as second,
            cluster.node("n2", "h2") as third,
        ):
            await cluster.put(image)
            await first.ask(WarmImage(image=image.ref()))
            request = WarmImage(image=image.ref(await first.holder()))
            async with second.channel.call(request) as call:
                replies = aiter(call)
                await anext(replies)
                third_request = WarmImage(image=image.ref(await second.holder()))
                following = asyncio.create_task(third.ask(third_request))
                async for _ in replies:
                    pass
                await following
            counters = (await third.record()).counters
            assert counters["cast_recv_bytes"] == len(image.data) and counters["disk_read_bytes"] == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("what", ["warm", "start"])
def test_who_comes_while_a_load_is_being_stopped_gets_one_of_its_own(tmp_path: Path, what: str) -> None:
    async def scenario() -> None:
        image = make_image("a", 1 << 20)
        async with (
            FakeCluster(tmp_path) as cluster,
            cluster.node("n0", "h0") as first,
            cluster.node("n1", "h1", *SLOW) as second,
        ):
            await cluster.put(image)
            await first.ask(WarmImage(image=image.ref()))
            holder = await first.holder()
            request = WarmImage(image=image.ref(holder))
            async with second.channel.call(request) as call:
                replies = aiter(call)
                await anext(replies)
                await anext(replies)
            # The call was given up: its load is on its way out when the next one comes.
            again = request if what == "warm" else start_request("i1", image, holder)
            async with asyncio.timeout(PATIENCE_S):
                last = (await second.ask(again))[-1]
            assert isinstance(last, Done | InstanceStarted)  # the engine has checked the region's bytes
            assert (await second.record()).holdings[0].image == image.digest

    asyncio.run(scenario())


def test_evicted_images_give_their_memory_back_at_once(tmp_path: Path) -> None:
    def deleted(cluster: FakeCluster) -> int:
        # A spare that was discarded is mapped until the thread that took its pages has noticed.
        for thread in threading.enumerate():
            if thread.name == "spare-prefault":
                thread.join()
        maps = Path("/proc/self/maps").read_text().splitlines()
        return sum("(deleted)" in line and cluster.id in line for line in maps)

    async def scenario() -> None:
        async with FakeCluster(tmp_path) as cluster, cluster.node("n0", "h0") as node:
            for number in range(6):
                image = make_image(f"x{number}", 6 << 20)
                blob = await cluster.put(image)
                await node.ask(WarmImage(image=image.ref()))
                assert deleted(cluster) == 0
            assert (await node.record()).counters["evictions"] == 4
            broken = make_image("broken", 6 << 20)
            blob = await cluster.put(broken)
            blob.write_bytes(broken.data[:-1] + bytes([broken.data[-1] ^ 1]))
            with pytest.raises(RemoteError, match="damaged"):
                await node.ask(start_request("i1", broken))
            assert deleted(cluster) == 0
            await node.ask(start_request("i2", image))
            assert deleted(cluster) == 0

    gc.disable()
    try:
        asyncio.run(scenario())
    finally:
        gc.enable()


def test_a_load_left_while_it_is_published_holds_no_image(tmp_path: Path) -> None:
    async def scenario() -> None:
        image = make_image("a", 512 << 10)
        async with (
            FakeCluster(tmp_path) as cluster,
            cluster.node("n0", "h0") as first,
            cluster.node("n1", "h1", *SLOW) as node,
        ):
            await cluster.put(image)
            await first.ask(WarmImage(image=image.ref()))
            folder = cluster.shm / "h1"
            async with node.channel.call(WarmImage(image=image.ref(await first.holder()))) as call:
                replies = aiter(call)
                await anext(replies)
                lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
                fcntl.flock(lock, fcntl.LOCK_EX)  # as a peer does for a moment
                while (await first.record()).counters["cast_sent_bytes"] < 512 << 10:
                    await node.record()
            await node.record()  # the node has heard that the caller left
            os.close(lock)
            while (folder / f"{image.digest}.part").exists():
                await node.record()
            async with asyncio.timeout(PATIENCE_S):
                while (folder / image.digest).exists():
                    await node.ask(DropImage(image=image.digest, tier="host"))

    asyncio.run(scenario())


def test_work_done_together_fails_where_a_part_was_cancelled_from_elsewhere() -> None:
    async def scenario() -> None:
        async def cancelled() -> None:
            raise asyncio.CancelledError

        with pytest.raises(StartFailed, match="was cancelled"):
            await together(cancelled(), asyncio.sleep(0))

    asyncio.run(scenario())


def test_a_peer_from_which_nothing_comes_is_given_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        image = make_image("a", 4 << 20)
        network, growing = MemoryNetwork(), GrowingRegion(image.data)
        growing.mark(0, len(image.data) // 2)
        stuck = network.add(PeerAddress(url="tcp://stuck:1", host="a"), {image.digest: growing})
        complete = GrowingRegion(image.data, complete=True)
        sound = network.add(PeerAddress(url="tcp://sound:1", host="b"), {image.digest: complete})
        connector = Connector("z", [MemoryTransport(network, name="tcp")])
        tier = HostTier(tmp_path / "h0", 16 << 20)
        filling = tier.begin(image.digest, len(image.data))
        assert isinstance(filling, Filling)
        target = Target(filling, image.manifest, lambda arrived: None)
        with pytest.raises(NoHolder, match="came for"):
            await from_peers(connector, [stuck], target, Counters(), stall_s=0.2)
        report = await from_peers(connector, [stuck, sound], target, Counters(), stall_s=1.0)
        assert target.is_complete and sound.url in report.bytes_by_source
        tier.close()

    asyncio.run(scenario())


def test_scratch_folders_of_killed_nodes_are_swept(tmp_path: Path) -> None:
    parent = tmp_path / "scratch"
    code = (
        "import sys, pathlib; from invoker.scratch import scratch_folder\n"
        "with scratch_folder(pathlib.Path(sys.argv[1])) as f:\n"
        " (f / 'handler').mkdir(); print(f, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        theirs = Path(process.stdout.readline().strip())
        with scratch_folder(parent) as mine:
            assert (theirs / "handler").exists() and mine != theirs
        assert theirs.exists()
        process.kill()
        process.wait()
    with scratch_folder(parent) as mine:
        assert list(parent.iterdir()) == [mine]
    assert not parent.exists()


def test_cancelled_work_in_threads() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        started, go_on, undone = asyncio.Event(), threading.Event(), []

        def work() -> str:
            loop.call_soon_threadsafe(started.set)
            go_on.wait()
            return "late"

        task = asyncio.create_task(in_thread(work, undo=undone.append))
        await started.wait()
        task.cancel()
        await asyncio.wait([task], timeout=0.02)
        assert not task.done(), "a cancelled caller waits for the thread"
        go_on.set()
        await asyncio.wait([task])
        assert task.cancelled() and undone == ["late"]

        go_on.clear()
        started.clear()
        own = asyncio.create_task(in_own_thread(work))
        await started.wait()
        own.cancel()
        await asyncio.wait([own], timeout=PATIENCE_S)
        assert own.cancelled(), "a caller of an unbounded wait leaves at once"
        go_on.set()

    asyncio.run(scenario())


class FlakyState(MemoryState):
    """A state that does not answer while `away`."""

    away = False

    async def put_node(self, record: NodeRecord, ttl_s: float) -> bool:
        if self.away:
            raise StateUnavailable("away")
        return await super().put_node(record, ttl_s)


def node_record(epoch: int) -> NodeRecord:
    return NodeRecord(
        id="n0",
        host="h0",
        pid=1,
        epoch=epoch,
        state=NodeState.READY,
        device="cpu",
        gpu_type="cpu",
        gpu_count=1,
        channel="tcp://127.0.0.1:1",
        cast="tcp://127.0.0.1:2",
        gpu_bytes=1,
        gpu_free_bytes=1,
        host_bytes=1,
        host_free_bytes=1,
        reads_store=False,
        allows_handlers=False,
        link_rate_bytes_s=None,
        started_at=0.0,
    )


def instance_record(state: InstanceState) -> InstanceRecord:
    return InstanceRecord(
        instance_id="i1",
        function="f",
        version=1,
        node="n0",
        state=state,
        start_kind=StartKind.COLD,
        since=1.0,
    )


def test_what_changed_while_the_state_was_away_is_told_afterwards() -> None:
    async def scenario() -> None:
        state = FlakyState()
        epoch = await state.next_node_epoch("n0")
        publisher = Publisher(state, epoch, 6.0, GpuMeter("n0", epoch, lambda: 0, 0.0))
        running = asyncio.create_task(publisher.run(lambda: node_record(epoch)))
        await publisher.registered.wait()
        publisher.instance_changed(instance_record(InstanceState.STARTING))
        await _seen(state, InstanceState.STARTING)
        state.away = True
        publisher.node_changed()
        publisher.instance_changed(instance_record(InstanceState.LOADING))
        publisher.instance_changed(instance_record(InstanceState.READY))
        await asyncio.wait([running], timeout=0.3)
        assert not running.done()
        state.away = False
        await _seen(state, InstanceState.READY)
        publisher.close()
        await running

    asyncio.run(scenario())


async def _seen(state: MemoryState, wanted: InstanceState) -> None:
    """Return once the state knows the instance as `wanted`."""
    snapshot = await state.snapshot()
    if any(record.state is wanted for record in snapshot.instances):
        return
    async for _, change in state.watch(snapshot.cursor):
        record = getattr(change, "record", None)
        if isinstance(record, InstanceRecord) and record.state is wanted:
            return


def token(number: int) -> TokenOutput:
    return TokenOutput(request_id="r", token_id=number, logprob=None, finish_reason="", work=1)


@given(st.lists(st.integers(1, 100), max_size=8))
@settings(max_examples=50, deadline=None)
def test_batches_lose_nothing_and_wait_for_nothing(runs: list[int]) -> None:
    async def scenario() -> None:
        moved_on = asyncio.Event()

        async def outputs() -> AsyncIterator[TokenOutput]:
            number = 0
            for run in runs:
                await moved_on.wait()  # set only once what came before has been delivered
                moved_on.clear()
                for _ in range(run):
                    yield token(number)
                    number += 1

        got: list[int] = []
        moved_on.set()
        total = 0
        ends = {sum(runs[: index + 1]) for index in range(len(runs))}
        async for batch in batches(outputs()):
            total += len(batch)
            got += [output.token_id for output in batch]
            if total in ends:
                moved_on.set()
        assert got == list(range(sum(runs)))

    asyncio.run(scenario())


def test_arrays_cross_the_channel() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert (decode_array(encode_array(array)) == array).all()
    assert (decode_array(encode_array(array.T)) == array.T).all()


def test_log_rings_are_bounded() -> None:
    rings = LogRings(FakeClock())
    for number in range(300):
        rings.add(f"f{number}", "one\ntwo")
    assert rings.tail("f0", 10) == () and len(rings.tail("f299", 10)) == 2
    for number in range(2000):
        rings.add("f299", f"line {number}")
    lines = rings.tail("f299", 5000)
    assert len(lines) == 1000 and lines[-1].endswith("Z line 1999")
    assert lines[-1].startswith("2023-11-14T22:13:20.000Z")
    assert rings.tail("f299", 0) == ()
