"""One stage of a model in a process of its own: `python -m benchmarks.engine_stage`, told by its input.

Lines of JSON: the order (Order) in, `{"link": URL}` out; `{"behind": URL}` in, then the stage runs; each
`used` in is answered by the seconds that its steps have taken so far. It ends with its input.
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

from benchmarks.random_model import random_model
from invoker.engine.contract import EngineCall
from invoker.engine.factory import kv_bytes_needed
from invoker.engine.paths import LayerPath
from invoker.engine.runner import NOBODY
from invoker.engine.stage_engine import StageEngine
from invoker.stages.door import Door
from invoker.stages.link import StageKey
from invoker.stages.metered import MeteredStage
from invoker.stages.worker import StageWorker
from rdmacast.tls import NodeTls

SECRET = b"the stages of one measurement"
HOST = "benchmark"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Which stage of which model. With `local` it is reached by Unix socket."""

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
    """A StepMeter: the seconds of all steps."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began_s = 0.0

    def began(self) -> None:
        self._began_s = time.perf_counter()

    def ended(self, work: Sequence[tuple[EngineCall, int]]) -> None:
        self.seconds += time.perf_counter() - self._began_s


def open_door(*, local: bool) -> Door:
    """Where links come in; `local` ones by Unix socket."""
    return Door("127.0.0.1", 0, "127.0.0.1", HOST if local else "", SECRET, NodeTls())


def key_of(place: int) -> StageKey:
    return StageKey(pipeline="benchmark", epoch=0, place=place)


def metered(stage: StageEngine, watch: Stopwatch) -> MeteredStage:
    return MeteredStage(stage, watch, lambda _: NOBODY)


async def _serve(order: Order) -> None:
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
    async with open_door(local=order.local) as door:
        with door.awaiting(key_of(order.place)) as before:
            _say(link=door.url)
            behind = await door.dial((await _line())["behind"], HOST, key_of(order.following))
            worker = StageWorker(metered(stage, watch), await before, behind, name="stage")
            try:
                while await _line():
                    _say(used=watch.seconds)
            finally:
                await worker.aclose()


async def _line() -> dict[str, Any]:
    """The next line of the input; nothing at its end."""
    line = await asyncio.to_thread(sys.stdin.readline)
    found: dict[str, Any] = json.loads(line) if line else {}
    return found


def _say(**said: object) -> None:
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    asyncio.run(_serve(Order(**json.loads(sys.stdin.readline()))))
