"""Run one stage of a model in a process of its own: `python -m benchmarks.engine.stage`.

The protocol is JSON lines: a StageOrder in, `{"link": URL}` out; `{"behind": URL}` in, then the stage runs;
each `used` in is answered by the seconds of its steps so far. It ends with its input.
"""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from transformers import AutoConfig

from benchmarks.harness.random_model import random_model
from invoker.engine.contract import EngineCall
from invoker.engine.factory import kv_bytes_needed
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOrder:
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

    @property
    def line(self) -> str:
        return json.dumps(asdict(self))


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


async def _serve(order: StageOrder) -> None:
    torch.set_num_threads(order.threads)
    config = AutoConfig.for_model(**order.config)
    model = random_model(config, order.dtype, "cpu", context=order.context)
    spec = replace(model.spec, layers=(order.first, order.last))
    kv = kv_bytes_needed(
        spec.manifest.architecture,
        spec.config,
        spec.dtype,
        spec.context_length,
        order.sequences,
        layers=order.last - order.first,
    )
    stage, watch = StageEngine(spec, model.region, kv, path=LayerPath(order.path)), Stopwatch()
    async with open_listener(local=order.local) as listener:
        with listener.expect_link(key_of(order.place)) as before:
            _say(link=listener.url)
            behind = await listener.dial((await _line())["behind"], HOST, key_of(order.following))
            worker = StageWorker(metered(stage, watch), await before, behind, name="stage")
            try:
                while await _line():
                    _say(used=watch.seconds)
            finally:
                await worker.aclose()


async def _line() -> dict[str, Any]:
    """Return the next line of the input, or an empty object at its end."""
    line = await asyncio.to_thread(sys.stdin.readline)
    found: dict[str, Any] = json.loads(line) if line else {}
    return found


def _say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    asyncio.run(_serve(StageOrder(**json.loads(sys.stdin.readline()))))
