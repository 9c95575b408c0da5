"""Reads of an image that another process serves, for benchmarks.ablation.

`python -m benchmarks.ablation.reads SOCKET RANK FILE BYTES` is that process.
"""

import asyncio
import mmap
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.harness.crew import running_children
from benchmarks.harness.crew_member import serve_async
from benchmarks.harness.crew_messages import NO_ORDERS, MemberHello
from rdmacast.plan.planners.subgroups import balanced
from rdmacast.server.region import GrowingRegion
from rdmacast.server.region_server import RegionServer
from rdmacast.transport import Link, PeerAddress, Transport
from registry.images.manifest import UNIT_BYTES
from registry.images.verify import unit_checksums

SECRET = b"only for measuring"
HOST = "bench"
_REGION = "image"
_LAYERS = 24
# Shares of a layer's bytes: q, k, v, o, gate, up and down; the two norms have _NORM_BYTES each.
_SHARES = (4, 4, 4, 4, 11, 11, 11)
_NORM_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ReadCost:
    """Wall and CPU seconds of a transfer."""

    seconds: float
    processor_s: float


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """The `[start, end)` of each read, contiguous over the whole image."""

    parts: tuple[tuple[int, int], ...]

    async def run(self, transport: Transport, peer: PeerAddress, window: int, *, fresh: bool) -> ReadCost:
        """Read all parts, `window` concurrently, into existing memory or, if `fresh`, new memory per part."""
        nbytes = self.parts[-1][1]
        ready = None if fresh else memoryview(_touched(nbytes))
        left = iter(self.parts)
        kept: list[memoryview] = []

        async def work(link: Link) -> None:
            for start, end in left:
                into = memoryview(mmap.mmap(-1, end - start)) if ready is None else ready[start:end]
                kept.append(into)  # like the image
                await link.read_into(_REGION, start, into)
                _check(into)

        async with transport.connect(peer) as link:
            started_s, started_processor_s = time.perf_counter(), time.process_time()
            async with asyncio.TaskGroup() as group:
                for _ in range(window):
                    group.create_task(work(link))
            return ReadCost(time.perf_counter() - started_s, time.process_time() - started_processor_s)


def by_blocks(nbytes: int, count: int) -> ReadPlan:
    return ReadPlan(tuple((start, end) for start, end in balanced(nbytes, count) if end > start))


def by_tensors(nbytes: int) -> ReadPlan:
    """Return a read per tensor of a Llama: seven matrices and two norms per layer."""
    parts: list[tuple[int, int]] = []
    for start, end in balanced(nbytes, _LAYERS):
        matrices = max(0, end - start - 2 * _NORM_BYTES)
        sizes = [matrices * share // sum(_SHARES) for share in _SHARES]
        ends = [start]
        for size in (_NORM_BYTES, *sizes[:4], _NORM_BYTES, *sizes[4:-1]):
            ends.append(min(end, ends[-1] + size))
        parts += zip(ends, [*ends[1:], end], strict=True)
    return ReadPlan(tuple(part for part in parts if part[1] > part[0]))


def copied(nbytes: int) -> ReadCost:
    """Copy as many bytes, checked unit by unit."""
    source, target = _touched(nbytes), _touched(nbytes)
    whole, into = np.frombuffer(source, np.uint8), np.frombuffer(target, np.uint8)
    started_s, started_processor_s = time.perf_counter(), time.process_time()
    for start in range(0, nbytes, UNIT_BYTES):
        part = slice(start, min(nbytes, start + UNIT_BYTES))
        into[part] = whole[part]
        _check(memoryview(target)[part])
    return ReadCost(time.perf_counter() - started_s, time.process_time() - started_processor_s)


@contextmanager
def served(nbytes: int, shm_dir: Path) -> Iterator[PeerAddress]:
    """Serve an image in shared memory from another process while the block runs."""
    with tempfile.TemporaryDirectory(prefix="hypercast-ablation-", dir=shm_dir) as folder:
        arguments = (Path(folder) / "image", nbytes)
        with running_children("benchmarks.ablation.reads", NO_ORDERS, arguments) as crew:
            yield PeerAddress(url=crew.hellos[0].url, host=HOST)


async def _serve(path: str, rank: int, file: Path, nbytes: int) -> None:
    with file.open("w+b") as opened:
        opened.truncate(nbytes)
        mapped = mmap.mmap(opened.fileno(), nbytes)  # until the process ends
    np.frombuffer(mapped, np.uint8)[:] = 7
    async with RegionServer(SECRET, host=HOST) as server:
        server.publish(_REGION, GrowingRegion(memoryview(mapped), shm_path=str(file), complete=True))
        await serve_async(path, MemberHello(rank=rank, url=server.address.url), NO_ORDERS)
        await server.withdraw(_REGION)


def _check(part: memoryview) -> None:
    unit_checksums(part)


def _touched(nbytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, nbytes)
    np.frombuffer(memory, np.uint8)[:] = 1
    return memory


if __name__ == "__main__":
    path, rank, file, nbytes = sys.argv[1:]
    asyncio.run(_serve(path, int(rank), Path(file), int(nbytes)))
