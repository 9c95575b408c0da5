"""What a read of a file and a copy of memory take at the least: into memory that is there, nothing kept."""

import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from invoker.memory import advise_huge
from registry.images.manifest import UNIT_BYTES
from registry.images.verify import unit_checksums

BLOCK_BYTES = 8 << 20
COLD, WARM = "cold", "warm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way of bytes from one place to another; `run` takes it once and gives the seconds."""

    name: str
    path: str
    mode: str
    run: Callable[[], float]
    caches: tuple[str, ...] = ("",)


def read_limits(file: Path, shm: Path) -> list[Way]:
    """Reads of all of a file: into one shared mapping that was written before, or into fresh shared memory.

    `huge` is private memory in huge pages that was written before: there a disk's requests are not split.

    Nothing is checked, but for those `checked`: with the checksum of each unit, when the processor's cache
    has it, compared with nothing.
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
    ) -> Way:
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

        return Way(name="limit", path="disk-host", mode=mode, run=run, caches=caches)

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


def copy_limits(source: np.ndarray, target: np.ndarray) -> list[Way]:
    """Copies between memory that is mapped already, by one thread and by two."""

    def run(threads: int) -> float:
        step = -(-len(source) // threads)
        parts = [slice(at, at + step) for at in range(0, len(source), step)]
        workers = [threading.Thread(target=np.copyto, args=(target[at], source[at])) for at in parts]
        began_s = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return time.perf_counter() - began_s

    return [
        Way(name="limit", path="host-device", mode="memcpy-1", run=lambda: run(1)),
        Way(name="limit", path="host-device", mode="memcpy-2", run=lambda: run(2)),
    ]


def _read(file: Path, target: memoryview, nbytes: int, flags: int, depth: int, step: int = 0) -> float:
    """Read the file's blocks, so many at a time; direct reads go up to the end of the last page.

    With `step`, by so many bytes, of which the checksum is taken before the next are read.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | flags)

    def read(offset: int) -> None:
        end = min(offset + BLOCK_BYTES, nbytes)
        while offset < end:
            view = target[offset : offset + (step or BLOCK_BYTES)]
            got = os.preadv(descriptor, [view], offset)
            if not got:
                raise EOFError(f"{file} has become shorter")
            if step:
                unit_checksums(view[:got])
            offset += got

    offsets: Sequence[int] = range(0, nbytes, BLOCK_BYTES)
    try:
        with ThreadPoolExecutor(depth) as pool:
            began_s = time.perf_counter()
            list(pool.map(read, offsets))
            return time.perf_counter() - began_s
    finally:
        target.release()
        os.close(descriptor)
