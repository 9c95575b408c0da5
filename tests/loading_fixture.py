"""A cluster of fake nodes on which a function loads for as long as a test wants, and serves meanwhile."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from control_fixture import ALL_LAYERS, FakeCluster, open_cluster

from gateway.control import Control
from registry.function import FunctionVersion, Scaling
from registry.live import Live, LivePipeline, LiveRecord

LOW, HIGH = 0b000111, 0b111000


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
