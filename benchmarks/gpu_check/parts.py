"""Types and helpers shared by the parts of `benchmarks.gpu_check`."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTask:
    """The parameters of a part, which returns its rows before `ends_s` and skips what does not fit.

    `small` requests shapes that a CPU runs in seconds.
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
"""A result: `name`, `params` and figures; `ok` is False on failure."""

Part = Callable[[PartTask], list[Row]]


def row(name: str, params: Row, **figures: object) -> Row:
    return {"name": name, "params": params, **figures}


def wait_for(device: str) -> None:
    """Wait for the device's queued work."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def best_s(run: Callable[[], object], device: str, rounds: int = 5) -> float:
    """Return the minimum seconds of several runs, after one uncounted run."""
    run()
    found = []
    for _ in range(rounds):
        wait_for(device)
        started_s = time.perf_counter()
        run()
        wait_for(device)
        found.append(time.perf_counter() - started_s)
    return min(found)


def release_cached_memory(device: str) -> None:
    """Release torch's cached device memory: arenas are allocated beside it."""
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
