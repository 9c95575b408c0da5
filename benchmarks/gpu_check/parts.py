"""What the parts of `benchmarks.gpu_check` share: how they are told what to do, and what they say."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a part is given. It returns its rows in time, leaving out what there is no time for.

    `small` asks for shapes that a processor runs through in seconds.
    """

    device: str
    small: bool
    ends_s: float  # by time.perf_counter
    say: Callable[[str], None]

    @property
    def left_s(self) -> float:
        return self.ends_s - time.perf_counter()

    @property
    def cuda(self) -> bool:
        return self.device.startswith("cuda")


Row = dict[str, Any]
"""A result: `name`, `params`, figures; `ok` False where something is wrong."""

Part = Callable[[Task], list[Row]]


def row(name: str, params: Row, **figures: object) -> Row:
    return {"name": name, "params": params, **figures}


def wait_for(device: str) -> None:
    """Return once the device has done all it was given."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def best_s(run: Callable[[], object], device: str, rounds: int = 5) -> float:
    """The least seconds of a few runs, after one that is not counted."""
    run()
    found = []
    for _ in range(rounds):
        wait_for(device)
        began_s = time.perf_counter()
        run()
        wait_for(device)
        found.append(time.perf_counter() - began_s)
    return min(found)


def give_back_memory(device: str) -> None:
    """Have torch return what it keeps of the device's memory: arenas take theirs beside it."""
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
