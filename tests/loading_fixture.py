"""A cluster of fake nodes on which a function loads for as long as a test wants, and serves meanwhile."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from control_fixture import ALL_LAYERS, MIB, FakeCluster, digest, make_call, open_cluster, open_gateway

from gateway.callrun import CallRun
from gateway.contract import Assigned
from gateway.control import Control
from registry.function import FunctionVersion, Scaling
from registry.live import Live, LivePipeline, LiveRecord
from registry.messages import Tokens
from registry.node import Tier

LOW, HIGH = 0b000111, 0b111000
PROMPT = (1, 2, 3)


@dataclass(slots=True)
class LiveCluster:
    """All instances of `version` are loading; `hold` says which layers a node can run by now."""

    cluster: FakeCluster
    version: FunctionVersion

    @property
    def control(self) -> Control:
        return self.cluster.control

    def hold(self, **layers: int) -> None:
        for node, bits in layers.items():
            self.cluster.nodes[node].layers.hold(bits)

    def record(self, gateway: int = 0) -> LiveRecord | None:
        known = self.cluster.gateways[gateway].directory.live
        return known.record(self.version.function, self.version.version)

    def pipelines(self, gateway: int = 0) -> tuple[LivePipeline, ...]:
        record = self.record(gateway)
        return () if record is None else record.pipelines

    async def until_pipelines(self, count: int, gateway: int = 0) -> tuple[LivePipeline, ...]:
        changes = self.cluster.gateways[gateway].changes
        await changes.wait_for(lambda: len(self.pipelines(gateway)) == count)
        return self.pipelines(gateway)

    async def finish(self, *nodes: str) -> None:
        """Let these nodes' loads end; return once their instances are ready."""
        before = {one.node for one in self.cluster.ready()}
        for node in nodes:
            self.cluster.nodes[node].layers.hold(ALL_LAYERS)
            self.cluster.nodes[node].loading.open()
        await self.cluster.until_ready(len(before | set(nodes)))


@asynccontextmanager
async def loading_cluster(
    nodes: int = 2, *, gateways: int = 1, live: Live = Live.PIPELINE, instances: int | None = None
) -> AsyncIterator[LiveCluster]:
    async with open_cluster(nodes, gateways=gateways) as cluster:
        for node in cluster.nodes.values():
            node.loading.close()
        version = await cluster.deploy(Scaling(live=live, min_instances=instances or nodes))
        directory = cluster.control.directory
        await cluster.control.changes.wait_for(lambda: len(directory.instances()) == (instances or nodes))
        yield LiveCluster(cluster=cluster, version=version)
        for node in cluster.nodes.values():
            node.loading.open()


@asynccontextmanager
async def one_holder(nodes: int) -> AsyncIterator[FakeCluster]:
    """Nodes that are to load what another one holds, which has no room for an instance; no gateway."""
    async with open_cluster(nodes, gateways=0) as cluster:
        for node in cluster.nodes.values():
            node.loading.close()
        holder = await cluster.add_node("holder", gpu_bytes=1)
        await holder.hold(digest("image-1"), Tier.HOST, MIB)
        yield cluster
        for node in cluster.nodes.values():
            node.loading.open()


async def all_load(cluster: FakeCluster, count: int) -> LiveCluster:
    """So many nodes load, in one order."""
    version = await cluster.deploy(Scaling(live=Live.PIPELINE, min_instances=count, max_instances=count))
    directory = cluster.control.directory
    await cluster.control.changes.wait_for(lambda: len(directory.instances()) == count)
    return LiveCluster(cluster=cluster, version=version)


@asynccontextmanager
async def lone_cluster(nodes: int = 1, *, gateways: int = 1) -> AsyncIterator[LiveCluster]:
    """As loading_cluster, but each node loads alone."""
    async with one_holder(nodes) as cluster, AsyncExitStack() as stack:
        for number in range(gateways):
            cluster.gateways.append(await stack.enter_async_context(open_gateway(cluster, f"g{number}")))
        yield await all_load(cluster, nodes)


class Asking:
    """A call under way in a task of its own."""

    def __init__(self, cluster: LiveCluster, request_id: str, tokens: int, gateway: int = 0) -> None:
        control = cluster.cluster.gateways[gateway]
        call = make_call(cluster.version, request_id=request_id, prompt=PROMPT, tokens=tokens)
        self.run = CallRun(control.dispatcher, call)
        self.ids: list[int] = []
        self.assigned: list[Assigned] = []
        self._heard = asyncio.Event()
        self._placed = asyncio.Event()
        self._some = asyncio.Event()
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async with self.run as events:
            async for event in events:
                self._heard.set()
                if isinstance(event, Assigned):
                    self.assigned.append(event)
                    self._placed.set()
                if isinstance(event, Tokens):
                    self.ids += event.ids
                    self._some.set()

    async def entered(self) -> None:
        """Return once it is somewhere, or waits."""
        await self._heard.wait()

    async def placed(self) -> None:
        await self._placed.wait()

    async def begun(self) -> None:
        await self._some.wait()

    async def ends(self) -> list[int]:
        await self.task
        return self.ids

    def used(self) -> dict[tuple[str, str], tuple[int, bool]]:
        """What it used by call id and node, and whether that is exact."""
        return {(one.gpu.call_id, one.gpu.node): (one.gpu.gpu_us, one.exact) for one in self.run.used}
