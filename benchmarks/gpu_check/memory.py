"""The arena: copies from the host tier beside the copy limit, and integrity of its regions."""

import asyncio
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu_check.parts import PartTask, Row, best_s, row
from benchmarks.harness.arenas import copy_seconds, make_arena
from invoker.base.errors import OutOfDeviceMemory
from invoker.engine.device_memory import region_bytes
from invoker.host_tier.image_writer import ImageWriter
from invoker.host_tier.mapping import HostMapping
from invoker.host_tier.tier import HostTier
from invoker.instances.device_copy import copy_in
from invoker.memory.arena import COPY_CHUNK_BYTES, Arena, Region, copy_bytes

_ROUNDS = 3
_CHUNK_BYTES = 64 << 20
_IMAGE = "c0" * 32


@contextmanager
def host_folder() -> Iterator[Path]:
    """Provide a folder in shared memory for a host tier."""
    with tempfile.TemporaryDirectory(prefix="hypercast-gpu-check-", dir="/dev/shm") as folder:
        yield Path(folder)


@contextmanager
def host_image(nbytes: int) -> Iterator[HostMapping]:
    """Provide an image of `nbytes` bytes in a host tier."""
    with host_folder() as folder:
        tier = HostTier(folder / "tiers" / "gpu-check", nbytes)
        try:
            writer = tier.begin(_IMAGE, nbytes)
            assert isinstance(writer, ImageWriter)
            writer.prepare(0, nbytes)
            numbers = np.frombuffer(writer.view, np.uint64)
            numbers[:] = np.arange(len(numbers), dtype=np.uint64)
            del numbers
            with_view = writer.publish()
            try:
                yield with_view
            finally:
                with_view.close()
        finally:
            tier.close()


def copies(task: PartTask) -> list[Row]:
    """Time the node's copy of an image to the device, through page-locked memory and not, and the limit."""
    nbytes = (16 << 20) if task.small else (4 << 30)
    params: Row = {"bytes": nbytes}
    rows = []
    with host_image(nbytes) as mapping:
        task.say(f"copies: {nbytes / 1e9:.2f} GB in the host tier")
        arena = make_arena(task.device, nbytes)
        try:
            region = arena.reserve(nbytes)
            locked_s, plain_s = asyncio.run(_copies(arena, region, mapping.view))
            whole = _holds_numbers(region)
        finally:
            arena.close()
    limit_s = _limit(task.device, nbytes)
    for mode, seconds in (("page-locked", locked_s), ("not page-locked", plain_s)):
        rows.append(
            row(
                "hypercast",
                {**params, "mode": mode},
                ok=whole,
                seconds=seconds,
                gb_per_s=nbytes / min(seconds) / 1e9,
                share_of_limit=limit_s / min(seconds),
            )
        )
    rows.append(
        row("limit", {**params, "mode": "one copy"}, seconds=[limit_s], gb_per_s=nbytes / limit_s / 1e9)
    )
    return rows


async def _copies(arena: Arena, region: Region, view: memoryview) -> tuple[list[float], list[float]]:
    """Return the seconds to copy through page-locked memory, and without it."""
    locked_s, plain_s = [], []
    await copy_seconds(arena, region, view)
    for _ in range(_ROUNDS):
        started_s = time.perf_counter()
        for start in range(0, len(view), COPY_CHUNK_BYTES):
            piece = view[start : start + COPY_CHUNK_BYTES]
            if region.buffer is None:
                arena.fill(region, start, piece)
            else:
                copy_bytes(region.buffer[start : start + len(piece)], piece)
        plain_s.append(time.perf_counter() - started_s)
        locked_s.append(await copy_seconds(arena, region, view))
    return locked_s, plain_s


def _limit(device: str, nbytes: int) -> float:
    """Return the seconds of one copy from driver-locked memory to torch's memory."""
    source = torch.ones(nbytes, dtype=torch.uint8, pin_memory=device != "cpu")
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return best_s(lambda: target.copy_(source, non_blocking=True), device, _ROUNDS)


def _holds_numbers(region: Region) -> bool:
    """Return whether the region holds what `host_image` wrote."""
    numbers = region_bytes(region).view(torch.int64)
    step = _CHUNK_BYTES // 8
    for start in range(0, len(numbers), step):
        part = numbers[start : start + step]
        if not torch.equal(part, torch.arange(start, start + len(part), device=part.device)):
            return False
    return True


def integrity(task: PartTask) -> list[Row]:
    """Reserve, fill and free regions at random; they must be disjoint, aligned, and keep their bytes."""
    capacity = (8 << 20) if task.small else (1 << 30)
    steps = 200 if task.small else 500
    arena = make_arena(task.device, capacity)
    try:
        faults, most = _exercise(arena, capacity, steps)
        views = _views(arena)
    finally:
        arena.close()
    params: Row = {"capacity_bytes": capacity, "steps": steps}
    return [
        row("arena", params, ok=not faults, faults=faults[:8], most_regions=most),
        row("views", params, ok=all(views.values()), **views),
    ]


def _exercise(arena: Arena, capacity: int, steps: int) -> tuple[list[str], int]:
    """Return the faults found, and the maximum number of regions."""
    dice = random.Random(0)
    held: dict[int, Region] = {}
    faults: list[str] = []
    most = 0

    def verify(number: int) -> None:
        if not bool((region_bytes(held[number]) == number % 251).all()):
            faults.append(f"region {number} was overwritten")

    for number in range(steps):
        if held and dice.random() < 0.45:
            chosen = dice.choice(sorted(held))
            verify(chosen)
            arena.free(held.pop(chosen))
            continue
        nbytes = dice.randrange(1, capacity // 16)
        try:
            region = arena.reserve(nbytes)
        except OutOfDeviceMemory:
            continue
        if region.pointer % 256:
            faults.append(f"region {number} is not aligned")
        for other, known in held.items():
            if region.pointer < known.pointer + known.nbytes and known.pointer < region.pointer + nbytes:
                faults.append(f"regions {number} and {other} overlap")
        asyncio.run(copy_in(arena, region, 0, np.full(nbytes, number % 251, np.uint8).data))
        held[number] = region
        most = max(most, len(held))
    for number in held:
        verify(number)
    for region in held.values():
        arena.free(region)
    if (arena.free_bytes, arena.largest_free_bytes) != (arena.capacity_bytes, arena.capacity_bytes):
        faults.append(f"{arena.free_bytes} of {arena.capacity_bytes} bytes are free at the end")
    return faults, most


def _views(arena: Arena) -> dict[str, bool]:
    """Return whether torch reads and writes a region in place, also through DLPack."""
    region = arena.reserve(4096)
    view = region_bytes(region)
    shared = torch.from_dlpack(view)
    shared.fill_(7)
    found = {
        "in_place": view.data_ptr() == region.pointer,
        "dlpack_in_place": shared.data_ptr() == region.pointer,
        "dlpack_writes": bool((view == 7).all()),
    }
    arena.free(region)
    return found
