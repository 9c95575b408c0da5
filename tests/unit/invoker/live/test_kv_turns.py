"""K and V of several calls that move at once: one call after the other, and as long as they are kept."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from invoker.engine.kv.cache import KvShape
from invoker.engine.kv.slices import KvSlice, empty_slice
from invoker.kv.choice import KvPolicy, PrefillRate
from invoker.kv.transfer import KvConnector
from invoker.links.export_buffer import KvExportBuffer
from invoker.links.framing import LinkLost
from invoker.links.link import StageKey
from registry.messages.live import KvLocation, KvStage

SHAPE = KvShape(layers=2, heads=1, head_dim=4, dtype=torch.float32)
TOKENS = 3


class Stages:
    """Two stages, each with a layer, which give what the test lets them give; `asked` is by call."""

    url = host = "here"

    def __init__(self) -> None:
        self.exports = KvExportBuffer()
        self.asked: list[str] = []
        self.given: dict[str, asyncio.Future[None]] = {}
        self._news = asyncio.Condition()

    async def fetch_kv(
        self, stage: KvStage, key: StageKey, shape: KvShape, most_tokens: int, within_s: float
    ) -> KvSlice:
        name = key.sequence
        if name not in self.given:
            self.asked.append(name)
            self.given[name] = asyncio.get_running_loop().create_future()
        async with self._news:
            self._news.notify_all()
        await asyncio.shield(self.given[name])
        return empty_slice(shape, stage.first, stage.last, most_tokens)

    async def until(self, *asked: str) -> None:
        async with self._news:
            await self._news.wait_for(lambda: self.asked == list(asked))

    def finish(self, name: str) -> None:
        self.given[name].set_result(None)

    def fail(self, name: str, error: Exception) -> None:
        self.given[name].set_exception(error)


@dataclass(frozen=True, slots=True)
class Scene:
    stages: Stages
    connector: KvConnector

    def bring(self, name: str) -> "asyncio.Task[Sequence[KvSlice]]":
        held = (KvStage(link="a", host="a", first=0, last=1), KvStage(link="b", host="b", first=1, last=2))
        at = KvLocation(pipeline="p", epoch=0, sequence=name, stages=held)
        return asyncio.create_task(self.connector.load(name, TOKENS, at, SHAPE, PrefillRate()))


def make_scene(**settings: float) -> Scene:
    stages = Stages()
    return Scene(stages, KvConnector(stages, KvPolicy.ALWAYS, **settings))


async def test_calls_take_turns_in_their_order() -> None:
    scene = make_scene()
    brought = [scene.bring(name) for name in ("r0", "r1", "r2")]
    for number, one in enumerate(brought):
        await scene.stages.until(*(f"r{before}" for before in range(number + 1)))
        scene.stages.finish(f"r{number}")
        assert sorted(found.first for found in await one) == [0, 1]
    assert scene.connector.loaded_tokens == 3 * TOKENS


@pytest.mark.parametrize(
    "error", [LinkLost("it is gone"), RuntimeError("not enough memory: 1 bytes"), MemoryError()]
)
async def test_one_that_fails_or_leaves_lets_the_next_one_have_its_turn(error: Exception) -> None:
    scene = make_scene()
    brought = [scene.bring(f"r{number}") for number in range(5)]
    await scene.stages.until("r0")
    scene.stages.fail("r0", error)
    assert await brought[0] == ()
    await scene.stages.until("r0", "r1")
    brought[2].cancel()  # it waits
    brought[1].cancel()  # it has its turn
    await scene.stages.until("r0", "r1", "r3")
    scene.stages.finish("r3")
    await scene.stages.until("r0", "r1", "r3", "r4")
    scene.stages.finish("r4")
    assert all([await brought[3], await brought[4]])


async def test_what_is_not_kept_any_more_is_computed() -> None:
    scene = make_scene(keep_s=0.0)
    first = scene.bring("r0")
    await scene.stages.until("r0")
    assert await scene.bring("r1") == ()
    scene.stages.finish("r0")
    assert await first


async def test_what_is_to_be_computed_waits_for_nobody() -> None:
    stages = Stages()
    connector = KvConnector(stages, KvPolicy.AUTO)
    fast, unknown = PrefillRate(), PrefillRate()
    fast.record(1, SHAPE.layers, 1.0)  # a token a second: all that comes is sooner
    at = KvLocation(
        pipeline="p", epoch=0, sequence="r0", stages=(KvStage(link="a", host="a", first=0, last=2),)
    )
    first = asyncio.create_task(connector.load("r0", TOKENS, at, SHAPE, fast))
    await stages.until("r0")
    assert await connector.load("r1", TOKENS, at, SHAPE, unknown) == ()
    stages.finish("r0")
    assert await first


async def test_what_did_not_come_in_time_twice_is_not_asked_for_again() -> None:
    """Two calls wait for the least time that one waits; those behind them, as short as these, do not."""
    asked = Stages()
    connector, rate = KvConnector(asked, KvPolicy.AUTO), PrefillRate()
    rate.record(TOKENS, SHAPE.layers, 0.01)
    stages = (KvStage(link="a", host="a", first=0, last=2),)
    for name in ("r0", "r1", "r2"):
        at = KvLocation(pipeline="p", epoch=0, sequence=name, stages=stages)
        assert await connector.load(name, TOKENS, at, SHAPE, rate) == ()
    assert asked.asked == ["r0", "r1"]
