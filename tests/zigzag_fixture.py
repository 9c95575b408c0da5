"""Pairs of a node that loads and one that is ready, of which a test sees and holds what runs."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from invoker.engine.contract import (
    ComputeEngine,
    DeviceRegion,
    GenerateEngine,
    ModelSpec,
    NewSequence,
    TokenOutput,
)
from invoker.engine.decoder import DecoderEngine
from invoker.engine.fake import StepGate
from invoker.engine.kv_slices import KvSlice
from invoker.engine.stage_contract import Stage, StageFacts, StageInput, StageOutput
from registry.live_messages import OpenPipeline, StageOf
from registry.messages import Generate, Reply
from tests.stages_fixture import LiveCluster, LiveNode, PoisonedEngines, Source, requests_at


class WatchedStage:
    """A Stage that counts the parts of prompts that it has run."""

    def __init__(self, stage: Stage, ran: "Counter") -> None:
        self._stage = stage
        self._ran = ran

    @property
    def facts(self) -> StageFacts:
        return self._stage.facts

    @property
    def layers(self) -> tuple[int, int]:
        return self._stage.layers

    @property
    def has_head(self) -> bool:
        return self._stage.has_head

    @property
    def pages(self) -> int:
        return self._stage.pages

    def run(self, given: StageInput) -> StageOutput:
        output = self._stage.run(given)
        self._ran.add(len(given.step.chunks))
        return output

    def finish(self, given: StageInput) -> StageOutput:
        return self._stage.finish(given)

    def export_kv(self, sequence: str, layers: tuple[int, int] | None = None) -> KvSlice:
        return self._stage.export_kv(sequence, layers)

    def close(self) -> None:
        self._stage.close()


class Counter:
    """Of what threads do, for a test that waits for it."""

    def __init__(self) -> None:
        self.count = 0
        self._changed = threading.Condition()

    def add(self, count: int) -> None:
        with self._changed:
            self.count += count
            self._changed.notify_all()

    async def reaches(self, count: int) -> None:
        """Return once it is so many, or after a minute."""

        def wait() -> None:
            with self._changed:
                assert self._changed.wait_for(lambda: self.count >= count, 60.0), self.count

        await asyncio.to_thread(wait)


class HeldEngine:
    """A DecoderEngine whose steps wait for a gate; `kept` counts sequences that came with K and V."""

    def __init__(self, engine: DecoderEngine, gate: StepGate, reached: "Counter") -> None:
        self.engine = engine
        self.kept = 0
        self._gate = gate
        self._reached = reached

    @property
    def max_sequence_tokens(self) -> int:
        return self.engine.max_sequence_tokens

    @property
    def has_work(self) -> bool:
        return self.engine.has_work

    @property
    def sequences(self) -> int:
        return self.engine.sequences

    def add(self, sequence: NewSequence, kv: Sequence[KvSlice] = ()) -> None:
        self.kept += bool(kv)
        self.engine.add(sequence, kv)

    def cancel(self, request_id: str) -> None:
        self.engine.cancel(request_id)

    def step(self) -> list[TokenOutput]:
        self._reached.add(1)
        self._gate.wait()
        return self.engine.step()

    def close(self) -> None:
        self.engine.check_integrity()
        self.engine.close()


class WatchedEngines(PoisonedEngines):
    """`ran` counts what the stages run, `gate` holds the whole engine; `gate_reached` counts how often."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.ran = Counter()
        self.gate = StepGate()
        self.gate_reached = Counter()
        self.engines: list[HeldEngine] = []

    def make_stage(self, spec: ModelSpec, region: DeviceRegion, kv: DeviceRegion | None) -> Stage:
        return WatchedStage(super().make_stage(spec, region, kv), self.ran)

    def make(
        self, spec: ModelSpec, region: DeviceRegion, kv: DeviceRegion | None, max_concurrency: int
    ) -> GenerateEngine | ComputeEngine:
        made = super().make(spec, region, kv, max_concurrency)
        assert isinstance(made, DecoderEngine)
        self.engines.append(HeldEngine(made, self.gate, self.gate_reached))
        return self.engines[-1]


class Pair:
    """The first node of a cluster is the target, the second the source."""

    def __init__(self, live: LiveCluster) -> None:
        self.live = live
        self.target, self.source = live.nodes
        self.layers = live.model.packed.manifest.num_layers

    @property
    def target_engines(self) -> WatchedEngines:
        return engines_of(self.target)

    @property
    def source_engines(self) -> WatchedEngines:
        return engines_of(self.source)

    async def opening(self) -> OpenPipeline:
        stages: tuple[StageOf, ...] = await self.live.stages((0, self.layers - 1, self.layers))
        return OpenPipeline(pipeline="p", epoch=0, stages=stages, zigzag=True)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Reply]:
        async with self.source.node.channel.call(await self.opening()) as replies:
            yield await anext(replies)

    def requests(self, count: int) -> list[Generate]:
        """Of some ten tokens."""
        return requests_at(self.source, range(9, 9 + 3 * count, 3), tokens=8)


def engines_of(live: LiveNode) -> WatchedEngines:
    engines = live.node.engines
    assert isinstance(engines, WatchedEngines)
    return engines
