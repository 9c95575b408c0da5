"""A pipeline whose stages are processes, connected by real sockets, as on several nodes."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any, TypeVar

import msgspec

from benchmarks.engine.stage import (
    HOST,
    PROTOCOL,
    ConnectNext,
    ReportUsed,
    StageReady,
    StageTask,
    StageUsed,
    Stopwatch,
    key_of,
    metered,
    open_listener,
)
from benchmarks.harness.crew import Crew, running_children
from benchmarks.harness.random_model import RandomModel
from invoker.engine.contract import NewSequence
from invoker.engine.decoder import limits_for
from invoker.engine.paths import LayerPath
from invoker.engine.runner import UNBILLED
from invoker.engine.scheduling.pipeline_scheduler import PipelineScheduler, PipelineShape
from invoker.engine.stage_engine import StageEngine
from invoker.links.listener import StageListener
from invoker.pipeline.driver import PipelineDriver

T = TypeVar("T")
PATIENCE_S = 60.0


class ProcessPipeline:
    """A pipeline with the last stage in this process and one step in flight; made by `processes_of`."""

    def __init__(self, others: Crew, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self._others = others  # by their order in the pipeline
        self._run = run
        self._watch = Stopwatch()
        self._kept = ExitStack()
        self.driver: PipelineDriver | None = None

    def used_s(self) -> float:
        """Return the seconds of steps so far, on all stages."""
        return self._watch.seconds + sum(
            used.seconds for used in self._others.ask(ReportUsed(), StageUsed, PATIENCE_S)
        )

    def generate(self, sequences: Sequence[NewSequence]) -> list[list[tuple[float, int]]]:
        """Return each sequence's tokens with the seconds since the call at which they arrived."""
        found: list[list[tuple[float, int]]] = self._run(self._generate(sequences))
        return found

    async def open(
        self,
        listener: StageListener,
        stage: StageEngine,
        scheduler: PipelineScheduler,
        place: int,
        first: int,
    ) -> None:
        """Connect the stage at `place` here behind the others, of which `first` is the first."""
        with ExitStack() as stack:
            before = stack.enter_context(listener.expect_link(key_of(place)))
            links = [hello.url for hello in self._others.hellos]
            for rank, behind in enumerate([*links[1:], listener.url]):
                self._others.send(ConnectNext(url=behind), [rank])
            behind_us = await listener.dial(links[0], HOST, key_of(first))
            self.driver = PipelineDriver(
                metered(stage, self._watch), scheduler, await before, behind_us, name="driver"
            )
            await asyncio.to_thread(self._others.replies, range(len(links)), StageReady, PATIENCE_S)
            self._kept = stack.pop_all()  # closes the link from the others

    async def _generate(self, sequences: Sequence[NewSequence]) -> list[list[tuple[float, int]]]:
        started_s = time.perf_counter()

        async def one(sequence: NewSequence) -> list[tuple[float, int]]:
            assert self.driver is not None
            arrived = []
            async for output in self.driver.generate(sequence, UNBILLED):
                assert not output.error, output.error
                if output.token_id is not None:
                    arrived.append((time.perf_counter() - started_s, output.token_id))
            return arrived

        return list(await asyncio.gather(*(one(sequence) for sequence in sequences)))


@contextmanager
def processes_of(
    model: RandomModel, sequences: int, count: int, path: LayerPath, threads: int, *, local: bool
) -> Iterator[ProcessPipeline]:
    """Run the stages of a model, as equal as possible."""
    spec = model.spec
    manifest = spec.manifest
    cuts = [manifest.num_layers * i // count for i in range(count + 1)]
    head = 0 if manifest.tied_head else count - 1
    places = [place for place in range(count) if place != head]
    with ExitStack() as stack:
        tasks = [
            StageTask(
                config={**spec.config},
                dtype=spec.dtype,
                context=spec.context_length,
                sequences=sequences,
                path=path.value,
                threads=threads,
                place=place,
                first=cuts[place],
                last=cuts[place + 1],
                following=following,
                local=local,
            )
            for place, following in pairwise([*places, head])
        ]
        arguments = [[msgspec.json.encode(task).decode()] for task in tasks]
        others = stack.enter_context(running_children("benchmarks.engine.stage", PROTOCOL, *arguments))
        stage = model.stage((cuts[head], cuts[head + 1]), sequences, path)
        shape = PipelineShape(
            stages=count,
            pages=stage.pages,
            context=spec.context_length,
            vocabulary=stage.geometry.vocabulary,
            steps=1,
        )
        scheduler = PipelineScheduler(shape, limits_for("cpu", sequences=sequences))
        run = stack.enter_context(_loop())
        pipeline = ProcessPipeline(others, run)
        listener = open_listener(local=local)
        run(listener.__aenter__())
        stack.callback(lambda: run(listener.__aexit__()))
        run(pipeline.open(listener, stage, scheduler, head, places[0]))
        driver = pipeline.driver
        assert driver is not None
        stack.callback(lambda: run(driver.aclose()))
        yield pipeline


@contextmanager
def _loop() -> Iterator[Callable[[Coroutine[Any, Any, T]], T]]:
    """Run an event loop in a thread, and yield a function that runs coroutines there."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield lambda work: asyncio.run_coroutine_threadsafe(work, loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
