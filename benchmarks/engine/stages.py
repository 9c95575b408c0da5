"""A pipeline whose stages are processes, connected by real sockets, as on several nodes."""

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeVar

from benchmarks.engine.stage import HOST, StageOrder, Stopwatch, key_of, metered, open_listener
from benchmarks.harness.random_model import RandomModel
from invoker.engine.contract import NewSequence
from invoker.engine.decoder import limits_for
from invoker.engine.factory import kv_bytes_needed
from invoker.engine.paths import LayerPath
from invoker.engine.runner import UNBILLED
from invoker.engine.scheduling.pipeline_scheduler import PipelineScheduler, PipelineShape
from invoker.engine.stage_engine import StageEngine
from invoker.links.listener import StageListener
from invoker.pipeline.driver import PipelineDriver

T = TypeVar("T")


class _StageProcess:
    """One of the other stages."""

    def __init__(self, order: StageOrder) -> None:
        self.place = order.place
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.engine.stage"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._send(order.line)

    def link(self) -> str:
        return str(self._answer()["link"])

    def connect_next(self, behind: str) -> None:
        self._send(json.dumps({"behind": behind}))

    def used_s(self) -> float:
        """Return the seconds of its steps so far."""
        self._send('{"used": true}')
        return float(self._answer()["used"])

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"stage {self.place} has ended with {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found


class ProcessPipeline:
    """A pipeline with the last stage in this process and one step in flight; made by `processes_of`."""

    def __init__(
        self, others: Sequence[_StageProcess], run: Callable[[Coroutine[Any, Any, Any]], Any]
    ) -> None:
        self._others = others
        self._run = run
        self._watch = Stopwatch()
        self._kept = ExitStack()
        self.driver: PipelineDriver | None = None

    def used_s(self) -> float:
        """Return the seconds of steps so far, on all stages."""
        return self._watch.seconds + sum(other.used_s() for other in self._others)

    def generate(self, sequences: Sequence[NewSequence]) -> list[list[tuple[float, int]]]:
        """Return each sequence's tokens with the seconds since the call at which they arrived."""
        found: list[list[tuple[float, int]]] = self._run(self._generate(sequences))
        return found

    async def open(
        self, listener: StageListener, stage: StageEngine, scheduler: PipelineScheduler, place: int
    ) -> None:
        with ExitStack() as stack:
            before = stack.enter_context(listener.expect_link(key_of(place)))
            links = await asyncio.gather(*(asyncio.to_thread(other.link) for other in self._others))
            for other, behind in zip(self._others, [*links[1:], listener.url], strict=True):
                other.connect_next(behind)
            behind_us = await listener.dial(links[0], HOST, key_of(self._others[0].place))
            self.driver = PipelineDriver(
                metered(stage, self._watch), scheduler, await before, behind_us, name="driver"
            )
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
        others = []
        for place, following in pairwise([*places, head]):
            order = StageOrder(
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
            others.append(_StageProcess(order))
            stack.callback(others[-1].close)
        first, last = cuts[head], cuts[head + 1]
        arguments = (manifest.architecture, spec.config, spec.dtype, spec.context_length, sequences)
        kv = kv_bytes_needed(*arguments, layers=last - first)
        stage = StageEngine(replace(spec, layers=(first, last)), model.region, kv, path=path)
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
        run(pipeline.open(listener, stage, scheduler, head))
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
