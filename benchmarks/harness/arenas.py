"""A node's arena on any device, and the time of its copies."""

import time

import torch

from invoker.instances.device_copy import copy_arriving, cut_spans
from invoker.memory.arena import Arena, CpuArena, Region
from invoker.memory.cuda_arena import CudaArena


def make_arena(device: str, nbytes: int) -> Arena:
    """Return a node's arena on that device."""
    if device == "cpu":
        return CpuArena(nbytes)
    return CudaArena(torch.device(device).index or 0, nbytes)


async def copy_seconds(arena: Arena, region: Region, view: memoryview) -> float:
    """Copy a whole image into a region."""
    started_s = time.perf_counter()
    pieces = cut_spans([(0, len(view), None)], arena.copy_bytes)
    await copy_arriving(arena, region, view, pieces, _there)
    return time.perf_counter() - started_s


async def _there(offset: int, nbytes: int) -> None:
    """Return at once: the whole image is available."""
