"""The minimum times of file reads and memory copies: into existing memory, keeping nothing."""

import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from invoker.memory.mappings import advise_huge
from registry.images.manifest import UNIT_BYTES
from registry.images.verify import unit_checksums

BLOCK_BYTES = 8 << 20
COLD, WARM = "cold", "warm"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadMethod:
    """A way to move bytes from one place to another; `run` does it once and returns the seconds."""

    name: str
    path: str
    mode: str
    run: Callable[[], float]
    caches: tuple[str, ...] = ("",)


def read_limits(file: Path, shm: Path) -> list[LoadMethod]:
    """Return reads of a whole file into one touched shared mapping or into fresh shared memory.

    `huge` is touched private memory in huge pages, where a disk's requests are not split by page. Only
    `checked` computes each unit's checksum, while the unit is in the processor's cache, and compares it with
    nothing.
    """
    nbytes = file.stat().st_size
    mapped = mmap.mmap(-1, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
    np.frombuffer(mapped, np.uint8).fill(1)

    huge = mmap.mmap(-1, len(mapped), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advise_huge(huge)
    np.frombuffer(huge, np.uint8).fill(1)

    def limit(
        mode: str,
        flags: int,
        depth: int,
        caches: tuple[str, ...],
        *,
        target: mmap.mmap | None = mapped,
        step: int = 0,
    ) -> LoadMethod:
        def run() -> float:
            if target is not None:
                return _read(file, memoryview(target), nbytes, flags, depth, step)
            with (shm / "limit").open("w+b") as made:
                made.truncate(len(mapped))
                with mmap.mmap(made.fileno(), len(mapped)) as fresh:
                    advise_huge(fresh)
                    seconds = _read(file, memoryview(fresh), nbytes, flags, depth)
            (shm / "limit").unlink()
            return seconds

        return LoadMethod(name="limit", path="disk-host", mode=mode, run=run, caches=caches)

    direct = os.O_DIRECT
    return [
        limit("direct-1", direct, 1, (COLD,)),
        limit("direct-4", direct, 4, (COLD,)),
        limit("direct-4-huge", direct, 4, (COLD,), target=huge),
        limit("direct-4-fresh", direct, 4, (COLD,), target=None),
        limit("buffered-1", 0, 1, (COLD, WARM)),
        limit("buffered-2", 0, 2, (COLD, WARM)),
        limit("buffered-2-fresh", 0, 2, (WARM,), target=None),
        limit("buffered-2-checked", 0, 2, (WARM,), step=UNIT_BYTES),
    ]


def copy_limits(source: np.ndarray, target: np.ndarray) -> list[LoadMethod]:
    """Return copies between mapped memory, by one thread and by two."""

    def run(threads: int) -> float:
        step = -(-len(source) // threads)
        parts = [slice(at, at + step) for at in range(0, len(source), step)]
        workers = [threading.Thread(target=np.copyto, args=(target[at], source[at])) for at in parts]
        started_s = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return time.perf_counter() - started_s

    return [
        LoadMethod(name="limit", path="host-device", mode="memcpy-1", run=lambda: run(1)),
        LoadMethod(name="limit", path="host-device", mode="memcpy-2", run=lambda: run(2)),
    ]


def _read(file: Path, target: memoryview, nbytes: int, flags: int, depth: int, step: int = 0) -> float:
    """Read the file's blocks, `depth` at a time; direct reads extend to the end of the last page.

    With `step`, read `step` bytes at a time and compute their checksum before the next read.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | flags)

    def read(offset: int) -> None:
        end = min(offset + BLOCK_BYTES, nbytes)
        while offset < end:
            view = target[offset : offset + (step or BLOCK_BYTES)]
            got = os.preadv(descriptor, [view], offset)
            if not got:
                raise EOFError(f"{file} was truncated during the read")
            if step:
                unit_checksums(view[:got])
            offset += got

    offsets: Sequence[int] = range(0, nbytes, BLOCK_BYTES)
    try:
        with ThreadPoolExecutor(depth) as pool:
            started_s = time.perf_counter()
            list(pool.map(read, offsets))
            return time.perf_counter() - started_s
    finally:
        target.release()
        os.close(descriptor)
