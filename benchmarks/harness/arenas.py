"""A node's arena on any device, and the time of its copies."""

import time

import torch

from invoker.memory.arena import Arena, CpuArena, Region, copy_following
from invoker.memory.cuda_arena import CudaArena


def make_arena(device: str, nbytes: int) -> Arena:
    """Return a node's arena on that device."""
    if device == "cpu":
        return CpuArena(nbytes)
    return CudaArena(torch.device(device).index or 0, nbytes)


async def copy_seconds(arena: Arena, region: Region, view: memoryview) -> float:
    """Copy a whole image into a region."""
    started_s = time.perf_counter()
    await copy_following(arena, region, view, _there, lambda nbytes: None)
    return time.perf_counter() - started_s


async def _there(offset: int, nbytes: int) -> None:
    """Return at once: the whole image is available."""
