"""Bringing the bytes of an image into host memory: from the store, from the arena, from peers.

Every source writes into the same buffer and marks what has arrived and was checked; what one source
left open, the next one fills.
"""

import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing
from itertools import pairwise

import numpy as np

from invoker.counters import Counters
from invoker.filling import Filling
from invoker.host_mapping import release
from invoker.staging import Staging
from invoker.threads import in_thread
from invoker.together import together
from rdmacast.cast_limits import STALL_S
from rdmacast.connector import Connector
from rdmacast.pull import PullPlan, PullReport, pull
from rdmacast.region import GrowingRegion
from rdmacast.transport import PeerAddress
from registry.errors import CorruptImage
from registry.images.manifest import UNIT_BYTES, Manifest
from registry.images.store import BlobReader, BlobStore
from registry.images.verify import check_units

CHUNK_BYTES = 64 * UNIT_BYTES
READS_IN_FLIGHT = 6
STEP_BYTES = 8 * UNIT_BYTES  # with less, threads wait for each other's turn at the interpreter
MOST_BLOCKS, FEWEST_BLOCKS = 512, 16
BLOCK_BYTES = 4 << 20  # of a pull from one source, where the image is neither very small nor very large
_NAMED_UNITS = 8


class _LoadRegion(GrowingRegion):
    """The bytes of a load, for peers that read it meanwhile."""

    def release(self) -> None:
        """Let the memory go. Nobody is given a view of it any more."""
        release(self._view)


class Target:
    """An image being filled: its buffer, and which units are there. Belongs to the loop's thread."""

    def __init__(self, filling: Filling, manifest: Manifest, on_arrived: Callable[[int], None]) -> None:
        self.filling = filling
        self.manifest = manifest
        self.region = _LoadRegion(filling.view, shm_path=str(filling.path))
        self._on_arrived = on_arrived
        self._missing = np.ones(manifest.unit_count, bool)
        self.arrived_bytes = 0

    def __repr__(self) -> str:
        return f"<Target {self.manifest.sha256[:12]} {self.arrived_bytes} of {self.manifest.nbytes} bytes>"

    @property
    def is_complete(self) -> bool:
        return self.arrived_bytes == self.manifest.nbytes

    def mark(self, offset: int, nbytes: int) -> None:
        """`[offset, offset + nbytes)`, whole units, is here and was checked (again, it may be)."""
        for unit in range(offset // UNIT_BYTES, -(-(offset + nbytes) // UNIT_BYTES)):
            if self._missing[unit]:
                self._missing[unit] = False
                self.arrived_bytes += min(UNIT_BYTES, self.manifest.nbytes - unit * UNIT_BYTES)
        self.region.mark(offset, nbytes)
        self._on_arrived(self.arrived_bytes)

    def has(self, offset: int, nbytes: int) -> bool:
        """Whether all units of the range are here."""
        return not self._missing[offset // UNIT_BYTES : -(-(offset + nbytes) // UNIT_BYTES)].any()

    def chunks(self) -> Iterator[tuple[int, int]]:
        """What is missing, in order, as (offset, nbytes) of at most CHUNK_BYTES."""
        step = CHUNK_BYTES // UNIT_BYTES
        position, count = 0, len(self._missing)
        while position < count:
            if not self._missing[position]:
                position += 1
                continue
            end = position
            while end < count and end - position < step and self._missing[end]:
                end += 1
            start_byte = position * UNIT_BYTES
            yield start_byte, min(end * UNIT_BYTES, self.manifest.nbytes) - start_byte
            position = end

    def release(self) -> None:
        """Let the memory go. The load has ended, and nobody is given a view of it any more."""
        self.region.release()
        self.filling.abandon()

    def view(self, offset: int, nbytes: int) -> memoryview:
        return self.filling.view[offset : offset + nbytes]


async def from_store(store: BlobStore, target: Target, counters: Counters, *, local: bool) -> None:
    """Read what is missing from the store: in order, a few large reads at a time, each checked.

    A damaged unit is read once more, since the fault may lie on the way. Raises NotFound, StoreError,
    CorruptImage (naming the damaged units).
    """
    reader = await in_thread(store.open_blob, target.manifest.sha256, undo=lambda late: late.close())
    try:
        if reader.size != target.manifest.nbytes:
            raise CorruptImage(
                f"image {target.manifest.sha256} has {reader.size} bytes in the store, "
                f"its manifest says {target.manifest.nbytes}"
            )

        with closing(Staging(READS_IN_FLIGHT, CHUNK_BYTES)) as staging:

            async def read(offset: int, nbytes: int) -> None:
                read_bytes = await in_thread(_read_checked, reader, staging, target, offset, nbytes)
                if local:
                    counters.disk_read_bytes += read_bytes
                else:
                    counters.store_read_bytes += read_bytes

            await _each(target, read)
    finally:
        await in_thread(reader.close)


async def from_peers(
    connector: Connector,
    sources: Sequence[PeerAddress],
    target: Target,
    counters: Counters,
    *,
    stall_s: float = STALL_S,
) -> PullReport:
    """Pull the image from the first peer that can give it, going on with the next.

    A peer from which nothing comes for `stall_s` is given up. Raises CastError.
    """
    manifest = target.manifest
    plan = PullPlan(
        region=manifest.sha256,
        nbytes=manifest.nbytes,
        block_bytes=_block_bytes(manifest),
        sources=tuple(sources),
        stall_timeout_s=stall_s,
    )

    def check(offset: int, view: memoryview) -> Sequence[int]:
        return check_units(manifest, offset, view)

    def arrived(offset: int, nbytes: int) -> None:
        counters.cast_recv_bytes += nbytes
        target.mark(offset, nbytes)

    report = await pull(
        plan,
        target.filling.view,
        connector=connector,
        check=check,
        on_block=arrived,
        prepare=target.filling.prepare,
    )
    for transport, nbytes in report.bytes_by_transport.items():
        counters.received_by(transport, nbytes)
    return report


async def from_remains(target: Target) -> None:
    """Keep what a process that died had loaded, as far as it is sound."""
    filling, nbytes = target.filling, target.manifest.nbytes
    for start, end in await in_thread(lambda: list(filling.extents())):
        offset = -(-start // UNIT_BYTES) * UNIT_BYTES
        last = end if end == nbytes else end // UNIT_BYTES * UNIT_BYTES
        while offset < last:
            step = min(CHUNK_BYTES, last - offset)
            damaged = await in_thread(check_units, target.manifest, offset, target.view(offset, step))
            edges = [unit * UNIT_BYTES for unit in damaged]
            for good, bad in pairwise([offset - UNIT_BYTES, *edges, offset + step]):
                if good + UNIT_BYTES < bad:
                    target.mark(good + UNIT_BYTES, bad - good - UNIT_BYTES)
            offset += step


async def from_memory(source: memoryview, target: Target) -> None:
    """Copy what is missing from memory of this process. Raises CorruptImage."""

    def copy(offset: int, nbytes: int) -> None:
        target.filling.prepare(offset, nbytes)
        view = target.view(offset, nbytes)
        np.copyto(np.frombuffer(view, np.uint8), np.frombuffer(source[offset : offset + nbytes], np.uint8))
        _refuse(check_units(target.manifest, offset, view), "in the arena", target.manifest)

    async def read(offset: int, nbytes: int) -> None:
        await in_thread(copy, offset, nbytes)

    await _each(target, read)


async def _each(target: Target, read: Callable[[int, int], Awaitable[None]]) -> None:
    """Run `read` over the missing chunks in order, READS_IN_FLIGHT at a time, marking what came."""
    chunks = target.chunks()

    async def work() -> None:
        for offset, nbytes in chunks:
            await read(offset, nbytes)
            target.mark(offset, nbytes)

    await together(*(work() for _ in range(READS_IN_FLIGHT)))


def _block_bytes(manifest: Manifest) -> int:
    """The size of a pull's blocks, in whole units: BLOCK_BYTES within the bounds of their number."""
    wanted = min(BLOCK_BYTES, -(-manifest.nbytes // FEWEST_BLOCKS))
    return max(1, -(-max(wanted, manifest.nbytes // MOST_BLOCKS) // UNIT_BYTES)) * UNIT_BYTES


def _read_checked(reader: BlobReader, staging: Staging, target: Target, offset: int, nbytes: int) -> int:
    """Read one chunk into its place and check it; returns how many bytes were read."""
    view, filling = target.view(offset, nbytes), target.filling
    cached = reader.cached(offset, nbytes)
    together = filling.takes_huge(offset, nbytes)
    if cached is not None and (together or filling.is_ready(offset, nbytes)):
        filling.prepare(offset, nbytes)
        damaged = _read_by_steps(reader, cached, target, offset, nbytes)
    elif cached is None and reader.is_direct and not together:
        damaged = _read_staged(reader, staging, target, offset, nbytes)
    else:
        if cached is None or not filling.receive(offset, nbytes, cached):
            filling.prepare(offset, nbytes)
            reader.read_into(offset, view)
        damaged = check_units(target.manifest, offset, view)
    for unit in damaged:
        start = unit * UNIT_BYTES
        end = min(start + UNIT_BYTES, target.manifest.nbytes)
        reader.read_into(start, target.view(start, end - start))
    if damaged:
        _refuse(check_units(target.manifest, offset, view), "in the store", target.manifest)
    return nbytes + len(damaged) * UNIT_BYTES


def _read_by_steps(reader: BlobReader, cached: int, target: Target, offset: int, nbytes: int) -> list[int]:
    """Read from the page cache, checking what came while the processor's cache has it; the damaged units.

    `cached` is an open file that has the range.
    """
    damaged = []
    for start in range(offset, offset + nbytes, STEP_BYTES):
        view = target.view(start, min(STEP_BYTES, offset + nbytes - start))
        try:
            whole = os.preadv(cached, [view], start) == len(view)
        except OSError:
            whole = False
        if not whole:
            reader.read_into(start, view)  # which tells what is wrong, if it is
        damaged += check_units(target.manifest, start, view)
    return damaged


def _read_staged(reader: BlobReader, staging: Staging, target: Target, offset: int, nbytes: int) -> list[int]:
    """Let the disk write to a buffer, check that and copy it to its place; the damaged units."""
    damaged = []
    with staging.lent() as buffer:
        reader.read_into(offset, buffer[:nbytes])
        for start in range(0, nbytes, STEP_BYTES):
            step = buffer[start : min(start + STEP_BYTES, nbytes)]
            damaged += check_units(target.manifest, offset + start, step)
            target.filling.write(offset + start, step)
    return damaged


def _refuse(damaged: Sequence[int], where: str, manifest: Manifest) -> None:
    if damaged:
        named = ", ".join(map(str, damaged[:_NAMED_UNITS]))
        more = f" and {len(damaged) - _NAMED_UNITS} more" if len(damaged) > _NAMED_UNITS else ""
        raise CorruptImage(f"image {manifest.sha256} is damaged {where}: units {named}{more}")
