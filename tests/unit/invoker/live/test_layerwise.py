"""A node that loads alone runs prompts by layers: the tokens are those of a whole engine."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from invoker.engine.contract import DeviceRegion, ModelSpec
from invoker.engine.stage_contract import Stage, StageInput, StageOutput
from registry.errors import RemoteError
from registry.messages.live import HandOffCalls, PipelineOpened
from registry.messages.node import CallsUsed, EndCalls, Generate, StopInstance
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.stages import (
    Answer,
    LiveCluster,
    Source,
    answer,
    live_cluster,
    open_pipeline,
    requests_at,
    requests_for,
)
from tests.fixtures.zigzag import Counter, WatchedEngines, WatchedStage

LAYERS = 4


class FirstLayer(WatchedStage):
    """Counts the prompts that are in it by now."""

    def __init__(self, stage: Stage, started: Counter) -> None:
        super().__init__(stage, Counter())
        self._started = started

    def run(self, given: StageInput) -> StageOutput:
        output = super().run(given)
        self._started.add(len(given.step.opened))
        return output


class LoneEngines(WatchedEngines):
    """`started` counts prompts of which a layer has run."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.started = Counter()

    def make_stage(self, spec: ModelSpec, region: DeviceRegion, kv: DeviceRegion | None) -> Stage:
        stage = super().make_stage(spec, region, kv)
        return stage if stage.layers[0] else FirstLayer(stage, self.started)


@asynccontextmanager
async def lone(folder: Path, kind: str) -> AsyncIterator[LiveCluster]:
    """Yield a node that has loaded the first layer."""
    async with (
        asyncio.timeout(2 * PATIENCE_S),
        live_cluster(folder, kind, 1, make_engines=LoneEngines) as live,
    ):
        assert live.model.packed.manifest.num_layers == LAYERS
        live.nodes[0].source.release(0, 1)
        engines(live).gate.open()
        yield live


def engines(live: LiveCluster) -> LoneEngines:
    made = live.nodes[0].node.engines
    assert isinstance(made, LoneEngines)
    return made


def ask(live: LiveCluster, requests: Sequence[Generate]) -> list[asyncio.Task[Answer]]:
    return [asyncio.create_task(answer(live.nodes[0].node, one)) for one in requests]


async def loaded(live: LiveCluster) -> None:
    (node,) = live.nodes
    node.source.release_all()
    assert node.task is not None
    await asyncio.shield(node.task)


def check(live: LiveCluster, requests: Sequence[Generate], answers: Sequence[Answer]) -> None:
    expected = live.expected(requests)
    for request, got in zip(requests, answers, strict=True):
        assert got.ids == expected[request.request_id] and got.finish_reason == "length"
        assert got.usage is not None and got.usage.gpu_us > 0


@pytest.mark.parametrize("kind", ["llama", "qwen2-tied", "gpt2"])
async def test_prompts_run_through_layers_as_they_land(tmp_path: Path, kind: str) -> None:
    async with lone(tmp_path, kind) as live, open_pipeline(live, (0, LAYERS)) as opened:
        assert isinstance(opened, PipelineOpened)
        requests = requests_for(live, 5)  # the first prompt has one token, which is the engine's
        asked = ask(live, requests)
        await engines(live).started.reaches(4)
        source = live.nodes[0].source
        source.release(1, 2)
        await engines(live).ran.reaches(8)
        source.release(2, 3)
        if source.missing:  # else the image is complete with that unit, and the engine runs the other layers
            await engines(live).ran.reaches(12)
        await loaded(live)
        check(live, requests, await asyncio.gather(*asked))
        assert engines(live).engines[0].kept == 4
        late = msgspec.structs.replace(requests[3], request_id="late")
        check(live, [late], await asyncio.gather(*ask(live, [late])))
        assert engines(live).engines[0].kept == 4


async def test_what_layers_and_engine_spend_is_their_calls(tmp_path: Path) -> None:
    async with lone(tmp_path, "qwen2") as live, open_pipeline(live, (0, LAYERS)):
        requests = requests_for(live, 4)[1:]
        asked = ask(live, requests)
        await engines(live).started.reaches(3)
        asked[0].cancel()  # what it spent is known, too
        await loaded(live)
        answers = await asyncio.gather(*asked[1:])
        names = tuple(one.request_id for one in requests)
        (used,) = await live.nodes[0].node.ask(EndCalls(request_ids=names))
        assert isinstance(used, CallsUsed) and set(used.gpu_us) == set(names)
        assert [used.gpu_us[name] for name in names[1:]] == [got.usage.gpu_us for got in answers if got.usage]
        busy = (await live.nodes[0].node.record()).counters["busy_us"]
        assert busy == sum(used.gpu_us.values()) and used.gpu_us["r1"] > 0


async def test_a_prompt_that_is_too_long_harms_no_other(tmp_path: Path) -> None:
    async with lone(tmp_path, "gpt2") as live, open_pipeline(live, (0, LAYERS)):
        fits, longer = requests_at(live.nodes[0].instance, (9, 3000), 8)
        asked = ask(live, [longer, fits])
        await engines(live).started.reaches(1)
        await loaded(live)
        with pytest.raises(RemoteError):
            await asked[0]
        check(live, [fits], [await asked[1]])


async def test_what_is_no_whole_model_is_refused(tmp_path: Path) -> None:
    async with lone(tmp_path, "llama") as live:
        with pytest.raises(RemoteError, match=r"layers \[0, 2\) of 4 are not the whole model"):
            await live.nodes[0].node.ask(await live.opening((0, 2)))


async def test_who_ends_it_at_once_where_it_is_ready_loses_nothing_that_was_begun(tmp_path: Path) -> None:
    async with lone(tmp_path, "llama") as live:
        requests = requests_for(live, 4)[1:]
        async with open_pipeline(live, (0, LAYERS)):
            asked = ask(live, requests)
            await engines(live).started.reaches(3)
            await loaded(live)
        check(live, requests, await asyncio.gather(*asked))
        assert engines(live).engines[0].kept == 3


async def test_prompts_that_wait_are_moved(tmp_path: Path) -> None:
    async with lone(tmp_path, "gpt2") as live:
        requests = requests_for(live, 4)[1:]
        async with open_pipeline(live, (0, LAYERS)):
            asked = ask(live, requests)
            await engines(live).started.reaches(3)
            leave = HandOffCalls(pipeline="p", epoch=0, request_ids=("r1", "elsewhere"))
            await live.nodes[0].node.ask(leave)
            moved = await asked[0]
            assert moved.finish_reason == "moved" and moved.ids == []
            asked[1].cancel()
            assert not asked[2].done()
        got = await asked[2]  # of a pipeline that ended before the node was ready
        assert got.finish_reason == "moved" and got.ids == [] and got.usage is not None
        await loaded(live)
        again = [msgspec.structs.replace(one, pipeline="") for one in requests]
        again = [msgspec.structs.replace(one, request_id=f"{one.request_id}+1") for one in again]
        check(live, again, await asyncio.gather(*ask(live, again)))


async def test_an_instance_that_is_stopped_ends_it(tmp_path: Path) -> None:
    async with lone(tmp_path, "llama") as live:
        (node,) = live.nodes
        requests = requests_for(live, 3)[1:]
        async with node.node.channel.call(await live.opening((0, LAYERS))) as replies:
            assert isinstance(await anext(replies), PipelineOpened)
            asked = ask(live, requests)
            await engines(live).started.reaches(2)
            await node.node.ask(StopInstance(instance_id=node.instance, grace_s=0.0))
            with pytest.raises(RemoteError, match="n0: instance i0 has ended") as lost:
                await anext(replies)
            assert lost.value.code == "pipeline_lost"
        for one in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(one, RemoteError) and one.code == "pipeline_lost"
