"""What each node of a call used: asked for exactly when it is cut short, and settled with the node."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from gateway.billing.ack_batcher import AckBatcher
from gateway.core.contract import Assigned, CallUsage, FunctionCall
from gateway.fakes.node import OUTPUT_US
from registry.messages.node import Compute, InvokeHandler, SettleCalls, Tokens
from registry.records.function import FunctionTask
from registry.records.usage import GpuSlice
from tests.fixtures.control import ask, make_call, open_cluster


def by_node(uses: Sequence[CallUsage]) -> dict[str, tuple[int, bool]]:
    return {use.gpu.node: (use.gpu.gpu_us, use.exact) for use in uses}


async def test_every_node_of_a_call_is_in_its_bill() -> None:
    async with open_cluster(2) as cluster:
        version = await cluster.deploy()
        await cluster.control.cluster.scale("f", 2, (), wait=True)
        seen = 0
        first = ""
        async with cluster.control.dispatcher.run(make_call(version, tokens=20)) as run:
            async for event in run:
                match event:
                    case Assigned(node=first):
                        pass
                    case Tokens():
                        seen += 1
                        if seen == 7:
                            await cluster.nodes[first].kill()
        other = next(name for name in cluster.nodes if name != first)
        used = by_node(run.used)
        assert used[first][0] >= 7 * OUTPUT_US and not used[first][1]
        assert used[other] == ((20 - used[first][0] // OUTPUT_US) * OUTPUT_US, True)
        assert [use.gpu.call_id for use in run.used] == ["r", "r+1"]
        # What the lost node did beyond what it reported is its own to write.
        assert sum(cluster.nodes[first].lost_us.values()) >= used[first][0]
        assert run.usage is not None and run.usage.gpu_us == sum(us for us, _ in used.values())
        cluster.control.settlement.add(run.used)
        await cluster.nodes[other].settles()
        assert cluster.nodes[other].settled == [("r+1",)]


@pytest.mark.parametrize("how", ["left", "cancelled", "timed out"])
async def test_a_call_cut_short_is_asked_for_its_exact_use(how: str) -> None:
    async with open_cluster(1) as cluster:
        node = cluster.nodes["n0"]
        version = await cluster.deploy()
        await ask(cluster.control, make_call(version, request_id="warm"))
        run = cluster.control.dispatcher.run(make_call(version, tokens=1000))
        got = asyncio.Event()

        async def read() -> None:
            async with run:
                async for event in run:
                    if isinstance(event, Tokens):
                        got.set()
                        if how == "left":
                            return
                        if how == "timed out":
                            raise TimeoutError
                        node.token.close()

        reader = asyncio.create_task(read())
        await got.wait()
        if how == "cancelled":
            await node.token.arrived()
            reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        (use,) = run.used
        assert use.exact and use.gpu.gpu_us == node.used_us["r"] >= OUTPUT_US
        assert cluster.control.stats().in_flight == 0


@pytest.mark.parametrize("task", [FunctionTask.EMBED, FunctionTask.HANDLER])
async def test_compute_and_handlers_that_are_cut_short_have_a_figure(task: FunctionTask) -> None:
    async with open_cluster(1) as cluster:
        node = cluster.nodes["n0"]
        version = await cluster.deploy(image=None, task=task)
        await cluster.control.cluster.scale("f", 1, (), wait=True)
        work: Compute | InvokeHandler = InvokeHandler(request_id="r", instance_id="", body=b"{}")
        if task is FunctionTask.EMBED:
            work = Compute(request_id="r", instance_id="", kind="embed", token_ids=((1, 2),))
        node.token.close()
        run = cluster.control.dispatcher.run(
            FunctionCall(request_id="r", tenant="t", version=version, work=work),
        )

        async def read() -> None:
            async with run:
                async for _ in run:
                    pass

        reader = asyncio.create_task(read())
        await node.token.arrived()
        node.used_us["r"] = 77  # what the node's meter has so far
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        assert by_node(run.used) == {"n0": (77, True)}


async def test_a_node_that_does_not_say_is_not_waited_for_long_nor_settled() -> None:
    async with open_cluster(1) as cluster:
        node = cluster.nodes["n0"]
        version = await cluster.deploy()
        await ask(cluster.control, make_call(version, request_id="warm"))
        async with cluster.control.dispatcher.run(make_call(version, tokens=1000)) as run:
            async for event in run:
                if isinstance(event, Tokens):
                    await node.cut()
                    break
        assert by_node(run.used) == {"n0": (OUTPUT_US, False)}
        settled: list[str] = []

        class NoLinks:
            def client(self, node: str) -> None:
                settled.append(node)

            def lost(self, node: str) -> None: ...

        ack_batcher = AckBatcher(NoLinks())
        ack_batcher.add(run.used)
        await ack_batcher.flush()
        assert not settled


async def test_settlement_goes_out_in_batches_and_waits_for_a_node_that_hangs() -> None:
    class Client:
        def __init__(self) -> None:
            self.asked: list[tuple[str, ...]] = []
            self.hangs = 0

        @asynccontextmanager
        async def call(self, request: SettleCalls) -> AsyncIterator[AsyncIterator[object]]:
            if self.hangs:
                self.hangs -= 1
                raise TimeoutError
            self.asked.append(request.request_ids)

            async def replies() -> AsyncIterator[object]:
                for _ in ():
                    yield None

            yield replies()

    class Links:
        def __init__(self) -> None:
            self.clients = {"n0": Client()}

        def client(self, node: str) -> Client | None:
            return self.clients.get(node)

        def lost(self, node: str) -> None: ...

    def uses(node: str, first: int, count: int) -> list[CallUsage]:
        return [
            CallUsage(gpu=GpuSlice(call_id=f"c{first + i}", instance_id="i", node=node, gpu_us=1), exact=True)
            for i in range(count)
        ]

    links = Links()
    ack_batcher = AckBatcher(links)  # type: ignore[arg-type]
    client = links.clients["n0"]
    client.hangs = 1
    ack_batcher.add(uses("n0", 0, 3) + uses("gone", 90, 2))
    await ack_batcher.flush()
    assert not client.asked
    ack_batcher.add(uses("n0", 3, 2000))
    await ack_batcher.flush()
    assert [len(batch) for batch in client.asked] == [1024, 979]
    assert sorted(sum(client.asked, ())) == sorted(f"c{i}" for i in range(2003))
    await ack_batcher.flush()
    assert len(client.asked) == 2
