"""The driver of a node that loads alone, where what it works with fails it."""

import asyncio
import socket

import pytest

from invoker.base.errors import NoSuchPipeline, PipelineLost
from invoker.engine.contract import NewSequence, TokenOutput
from invoker.engine.kv.slices import KvSlice
from invoker.engine.runner import UNBILLED, EngineRunner, NullMeter
from invoker.engine.stage_contract import StageInput, StageOutput
from invoker.instances.instance import Instance
from invoker.instances.lifecycle import accepted
from invoker.metering.accounts import MeterAccount
from invoker.pipeline.metered import StepCalls
from invoker.prefill.layer_feed import READY_TIMEOUT_S, follow_load
from invoker.prefill.layers import LoadedLayers
from invoker.prefill.source import PairDriver
from registry.messages.live import MOVED
from registry.messages.sampling import Sampling
from registry.records.instance import InstanceState
from tests.fixtures import patience
from tests.fixtures.fake_engine import FakeEngine, continuation
from tests.fixtures.fake_stage import FakeStage
from tests.fixtures.invoker import start_request

LAYERS = 3
PROMPT = (1, 2, 3, 4)
TOKENS = 5


class Layers:
    """Those of a model, which land when the test says so."""

    def __init__(self) -> None:
        self.layers = LAYERS
        self.landed = asyncio.Event()
        self.fault: Exception | None = None

    async def make(self, layer: int) -> FakeStage:
        await self.landed.wait()
        if self.fault is not None:
            raise self.fault
        return FakeStage(layer, layer + 1, LAYERS)


class NoRoom(FakeStage):
    """A first layer that has no room to run anything, or none to copy what it has made."""

    def __init__(self, *, runs: bool) -> None:
        super().__init__(0, 1, LAYERS)
        self.tried = asyncio.Event()
        self._runs = runs
        self._loop = asyncio.get_running_loop()

    def run(self, given: StageInput) -> StageOutput:
        self._loop.call_soon_threadsafe(self.tried.set)
        if given.step.chunks and not self._runs:
            raise MemoryError("none left")
        return super().run(given)

    def export_kv(self, sequence: str, layers: tuple[int, int] | None = None) -> KvSlice:
        raise MemoryError("none left")


class Scene:
    """An instance that loads, and its driver."""

    def __init__(self, first: FakeStage, patience_s: float) -> None:
        self.layers = Layers()
        life = accepted(start_request("i", None), "n", wall_s=0.0, now_s=0.0)
        life = life.with_phase("fetch", 0.0).with_state(InstanceState.LOADING, 0.0)
        account = MeterAccount(1, "i", "f", 1, "loading", starting=True, from_us=0, from_at=0.0)
        self.instance = Instance(start_request("i", None), life, account, lambda _: None)
        own = LoadedLayers(LAYERS, StepCalls(NullMeter(), lambda _: UNBILLED))
        own.append(first)
        before, behind = socket.socketpair()
        self.driver = PairDriver(
            self.instance, before, behind, pages=first.pages, longest=100, name="p", own=own
        )
        self.load = asyncio.create_task(follow_load(self.driver, self.instance, self.layers, patience_s))

    async def ask(self) -> list[TokenOutput]:
        request = NewSequence(
            request_id="r", prompt_ids=PROMPT, generated_ids=(), sampling=Sampling(max_tokens=TOKENS)
        )
        return [output async for output in self.driver.generate(request, UNBILLED)]

    def is_whole(self) -> None:
        self.layers.landed.set()
        self.instance.life = self.instance.life.ready(0.0, 0.0)


async def ended(scene: Scene) -> None:
    await scene.driver.aclose()
    await scene.load
    assert scene.driver.streams == 0
    with pytest.raises(NoSuchPipeline):
        await scene.ask()


async def test_what_waits_for_too_long_is_moved() -> None:
    async with asyncio.timeout(patience.PATIENCE_S):
        scene = Scene(FakeStage(0, 1, LAYERS), 0.0)
        (moved,) = await scene.ask()
        assert moved.finish_reason == MOVED and moved.token_id is None
        await scene.driver.wait_closed()
        assert str(scene.driver.failure) == "it is not ready after 0 s"
        await ended(scene)


async def test_an_instance_without_an_engine_has_lost_what_was_begun() -> None:
    async with asyncio.timeout(patience.PATIENCE_S):
        scene = Scene(FakeStage(0, 1, LAYERS), READY_TIMEOUT_S)
        asked = asyncio.create_task(scene.ask())
        scene.is_whole()
        with pytest.raises(PipelineLost, match="instance i has ended"):
            await asked
        await ended(scene)


@pytest.mark.parametrize("runs", [False, True])
async def test_a_prompt_for_which_there_is_no_memory_is_the_engines(runs: bool) -> None:
    async with asyncio.timeout(patience.PATIENCE_S):
        first = NoRoom(runs=runs)
        scene = Scene(first, READY_TIMEOUT_S)
        scene.instance.runner = runner = EngineRunner(FakeEngine())
        asked = asyncio.create_task(scene.ask())
        await first.tried.wait()
        scene.is_whole()
        outputs = await asked
        assert [one.token_id for one in outputs if one.token_id is not None] == continuation(PROMPT, TOKENS)
        assert scene.driver.failure is None and scene.driver.prefilled_prompts == 0
        await ended(scene)
        await runner.aclose()


async def test_a_fault_that_nobody_foresaw_ends_it_and_is_told() -> None:
    async with asyncio.timeout(patience.PATIENCE_S):
        scene = Scene(FakeStage(0, 1, LAYERS), READY_TIMEOUT_S)
        scene.layers.fault = fault = KeyError("a mistake of ours")
        scene.layers.landed.set()
        await scene.driver.wait_closed()
        assert scene.driver.failure is fault
        scene.driver.fail(fault)
        with pytest.raises(KeyError):
            await scene.ask()
        await scene.driver.aclose()
