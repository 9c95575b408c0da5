"""Engines that look at no byte of an image when they are made, and so are made while it arrives."""

import asyncio
import threading
from pathlib import Path

import msgspec
import pytest

from invoker.engine.contract import ComputeEngine, DeviceRegion, GenerateEngine, ModelSpec
from registry.errors import RemoteError
from tests.fixtures.invoker import FakeCluster, FakeEngines, make_image, start_request
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.stages import PoisonedEngines, Source, answer, live_cluster, requests_for


class TellingEngines(PoisonedEngines):
    """`made` is set once one is."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.made = threading.Event()

    def make(
        self, spec: ModelSpec, region: DeviceRegion, kv: DeviceRegion | None, max_concurrency: int
    ) -> GenerateEngine | ComputeEngine:
        engine = super().make(spec, region, kv, max_concurrency)
        self.made.set()
        return engine


@pytest.mark.parametrize("kind", ["llama", "qwen2-tied", "gpt2"])
async def test_an_engine_is_there_before_the_first_byte(tmp_path: Path, kind: str) -> None:
    async with (
        asyncio.timeout(PATIENCE_S),
        live_cluster(tmp_path, kind, 1, make_engines=TellingEngines) as live,
    ):
        one = live.nodes[0]
        engines = one.node.engines
        assert isinstance(engines, TellingEngines) and one.task is not None
        assert await asyncio.to_thread(engines.made.wait, PATIENCE_S)
        assert one.held == 0 and one.started is None
        one.source.release_all()
        await one.task
        requests = [msgspec.structs.replace(request, pipeline="") for request in requests_for(live, 4)]
        found = {request.request_id: (await answer(one.node, request)).ids for request in requests}
        assert found == live.expected(requests)


async def test_an_engine_that_was_made_for_nothing_is_closed(tmp_path: Path) -> None:
    image, engines = make_image("a", 1 << 20), FakeEngines(early=True)
    async with FakeCluster(tmp_path) as cluster, cluster.node("n0", "h0", engines=engines) as node:
        for number in range(3):
            with pytest.raises(RemoteError, match="cannot be loaded"):
                await node.ask(start_request(f"i{number}", image))
        assert engines.made and all(engine.closed for engine in engines.made)
        record = await node.record()
        assert record.gpu_free_bytes == record.gpu_bytes
