"""Run one stage of a model in a process of its own: `python -m benchmarks.engine.stage SOCKET RANK TASK`.

Its hello has the URL of its listener; it runs once it was connected to the stage behind it.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import torch
from transformers import AutoConfig

from benchmarks.harness.crew_member import serve_async
from benchmarks.harness.crew_messages import CrewMessage, CrewProtocol, MemberHello
from benchmarks.harness.random_model import random_model
from invoker.engine.contract import EngineCall
from invoker.engine.paths import LayerPath
from invoker.engine.runner import UNBILLED
from invoker.engine.stage_engine import StageEngine
from invoker.links.link import StageKey
from invoker.links.listener import StageListener
from invoker.pipeline.metered import MeteredStage
from invoker.pipeline.worker import StageWorker
from rdmacast.protocol.tls import NodeTls

SECRET = b"the stages of one measurement"
HOST = "benchmark"


class StageTask(msgspec.Struct, frozen=True, kw_only=True):
    """The stage and model to run; with `local` it is reached by Unix socket."""

    config: dict[str, Any]
    dtype: str
    context: int
    sequences: int
    path: str
    threads: int
    place: int
    first: int
    last: int
    following: int
    local: bool


class ConnectNext(CrewMessage, frozen=True, kw_only=True):
    """Connect to the stage behind, at `url`, and run; answered by StageReady."""

    url: str


class StageReady(CrewMessage, frozen=True, kw_only=True):
    """Both links are there."""


class ReportUsed(CrewMessage, frozen=True, kw_only=True):
    """Report the computing time; answered by StageUsed."""


class StageUsed(CrewMessage, frozen=True, kw_only=True):
    """The seconds of the stage's steps so far."""

    seconds: float


PROTOCOL = CrewProtocol.of(ConnectNext | ReportUsed, StageReady | StageUsed)


class Stopwatch:
    """A StepMeter that sums the seconds of all steps."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began_s = 0.0

    def start_step(self) -> None:
        self._began_s = time.perf_counter()

    def end_step(self, work: Sequence[tuple[EngineCall, int]]) -> None:
        self.seconds += time.perf_counter() - self._began_s


def open_listener(*, local: bool) -> StageListener:
    """Where links come in; `local` ones by Unix socket."""
    return StageListener("127.0.0.1", 0, "127.0.0.1", HOST if local else "", SECRET, NodeTls())


def key_of(place: int) -> StageKey:
    return StageKey(pipeline="benchmark", epoch=0, place=place)


def metered(stage: StageEngine, watch: Stopwatch) -> MeteredStage:
    return MeteredStage(stage, watch, lambda _: UNBILLED)


async def _serve(path: str, rank: int, task: StageTask) -> None:
    torch.set_num_threads(task.threads)
    config = AutoConfig.for_model(**task.config)
    model = random_model(config, task.dtype, "cpu", context=task.context)
    stage = model.stage((task.first, task.last), task.sequences, LayerPath(task.path))
    watch = Stopwatch()
    async with AsyncExitStack() as stack:
        listener = await stack.enter_async_context(open_listener(local=task.local))
        before = stack.enter_context(listener.expect_link(key_of(task.place)))

        async def carry_out(order: ConnectNext | ReportUsed) -> StageReady | StageUsed:
            if isinstance(order, ReportUsed):
                return StageUsed(seconds=watch.seconds)
            behind = await listener.dial(order.url, HOST, key_of(task.following))
            worker = StageWorker(metered(stage, watch), await before, behind, name="stage")
            stack.push_async_callback(worker.aclose)
            return StageReady()

        await serve_async(path, MemberHello(rank=rank, url=listener.url), PROTOCOL, carry_out)


if __name__ == "__main__":
    task = msgspec.json.decode(sys.argv[3], type=StageTask)
    asyncio.run(_serve(sys.argv[1], int(sys.argv[2]), task))
