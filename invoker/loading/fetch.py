"""Sources of an image's bytes on this machine or in the store: no nodes, so no casts (see `cast_fetch`).

Each writes into the same PartialImage as a cast and marks verified units; the next source fills what is
missing. None has a bitfield, links or a region server to run a cast with: they are files and memory, and
reading them is fastest in order, with direct I/O or from the page cache.
"""

import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from functools import partial
from itertools import pairwise
from typing import Protocol

from invoker.host_tier.image_writer import ImageWriter
from invoker.host_tier.staging import Staging
from invoker.loading.image_copies import ReadArena
from invoker.loading.partial_image import CHUNK_BYTES, PartialImage
from invoker.loading.unit_writer import UnitWriter
from rdmacast.aio.groups import run_all
from rdmacast.aio.threads import run_in_thread
from registry.errors import CorruptImage
from registry.images.manifest import UNIT_BYTES, Manifest
from registry.images.store import BlobReader
from registry.images.verify import check_units

READS_IN_FLIGHT = 6
STEP_BYTES = 8 * UNIT_BYTES  # smaller steps make threads contend for the GIL
_NAMED_UNITS = 8


class BlobSource(Protocol):
    """Where whole images are read from: the store, or a disk of this host."""

    def open_blob(self, digest: str) -> BlobReader:
        """Open an image for reading. Raises NotFound, StoreError."""
        ...


async def from_blobs(source: BlobSource, target: PartialImage, count: Callable[[int], None]) -> None:
    """Read what is missing from the store or a disk, in order, READS_IN_FLIGHT at a time, and verify it.

    `count` receives the number of bytes read. A damaged unit is read again once, since the fault may lie in
    the transfer. Raises NotFound, StoreError, CorruptImage (naming the damaged units).
    """
    reader = await run_in_thread(source.open_blob, target.manifest.sha256, undo=lambda late: late.close())
    try:
        if reader.size != target.manifest.nbytes:
            raise CorruptImage(
                f"image {target.manifest.sha256} has {reader.size} bytes there, "
                f"its manifest says {target.manifest.nbytes}"
            )

        with closing(Staging(READS_IN_FLIGHT, CHUNK_BYTES)) as staging:

            async def read(offset: int, view: memoryview) -> None:
                read = partial(_read_checked, reader, staging, target.writer, target.manifest)
                count(await run_in_thread(read, offset, view))

            await _for_missing(target, read)
    finally:
        await run_in_thread(reader.close)


async def from_orphaned_file(writer: ImageWriter, target: PartialImage) -> None:
    """Verify and keep what a dead process had loaded into the writer's file."""
    nbytes = target.manifest.nbytes
    for start, end in await run_in_thread(lambda: list(writer.extents())):
        offset = -(-start // UNIT_BYTES) * UNIT_BYTES
        last = end if end == nbytes else end // UNIT_BYTES * UNIT_BYTES
        while offset < last:
            step = min(CHUNK_BYTES, last - offset)
            view = writer.view[offset : offset + step]
            damaged = await run_in_thread(check_units, target.manifest, offset, view)
            edges = [unit * UNIT_BYTES for unit in damaged]
            for good, bad in pairwise([offset - UNIT_BYTES, *edges, offset + step]):
                if good + UNIT_BYTES < bad:
                    target.mark(good + UNIT_BYTES, bad - good - UNIT_BYTES)
            offset += step


async def from_arena(source: ReadArena, target: PartialImage) -> None:
    """Copy what is missing from this node's arena. Raises CorruptImage."""

    def copy(offset: int, view: memoryview) -> None:
        target.writer.prepare(offset, len(view))
        source(offset, view)
        _check_undamaged(check_units(target.manifest, offset, view), "in the arena", target.manifest)

    async def read(offset: int, view: memoryview) -> None:
        await run_in_thread(copy, offset, view)

    await _for_missing(target, read)


async def _for_missing(target: PartialImage, read: Callable[[int, memoryview], Awaitable[None]]) -> None:
    """Run `read` over the missing chunks, READS_IN_FLIGHT at a time, keep and mark them."""
    chunks = target.missing_chunks()

    async def work() -> None:
        for offset, nbytes in chunks:
            async with target.lend(offset, nbytes) as view:
                await read(offset, view)
                await target.keep(offset, view)
            target.mark(offset, nbytes)

    await run_all(*(work() for _ in range(READS_IN_FLIGHT)))


def _read_checked(
    reader: BlobReader,
    staging: Staging,
    writer: UnitWriter,
    manifest: Manifest,
    offset: int,
    view: memoryview,
) -> int:
    """Read one chunk into its place and verify it; return the number of bytes read."""
    nbytes = len(view)
    cached = reader.cached(offset, nbytes)
    is_huge = writer.populate_huge(offset, nbytes)
    if cached is not None and (is_huge or writer.is_ready(offset, nbytes)):
        writer.prepare(offset, nbytes)
        damaged = _read_by_steps(reader, cached, manifest, offset, view)
    elif cached is None and reader.is_direct and not is_huge:
        damaged = _read_staged(reader, staging, writer, manifest, offset, nbytes)
    else:
        if cached is None or not writer.receive(offset, nbytes, cached):
            writer.prepare(offset, nbytes)
            reader.read_into(offset, view)
        damaged = check_units(manifest, offset, view)
    for unit in damaged:
        start = unit * UNIT_BYTES - offset
        reader.read_into(offset + start, view[start : start + UNIT_BYTES])
    if damaged:
        _check_undamaged(check_units(manifest, offset, view), "in the store", manifest)
    return nbytes + len(damaged) * UNIT_BYTES


def _read_by_steps(
    reader: BlobReader, cached: int, manifest: Manifest, offset: int, into: memoryview
) -> list[int]:
    """Read from the page cache, verifying each step while the CPU cache holds it; return the damaged units.

    `cached` is an open file with the range.
    """
    damaged = []
    for start in range(0, len(into), STEP_BYTES):
        view, at = into[start : start + STEP_BYTES], offset + start
        try:
            whole = os.preadv(cached, [view], at) == len(view)
        except OSError:
            whole = False
        if not whole:
            reader.read_into(at, view)  # raises the cause, if it persists
        damaged += check_units(manifest, at, view)
    return damaged


def _read_staged(
    reader: BlobReader, staging: Staging, writer: UnitWriter, manifest: Manifest, offset: int, nbytes: int
) -> list[int]:
    """Read into a staging buffer, verify and copy it; return the damaged units."""
    damaged = []
    with staging.borrow() as buffer:
        reader.read_into(offset, buffer[:nbytes])
        for start in range(0, nbytes, STEP_BYTES):
            step = buffer[start : min(start + STEP_BYTES, nbytes)]
            damaged += check_units(manifest, offset + start, step)
            writer.write(offset + start, step)
    return damaged


def _check_undamaged(damaged: Sequence[int], where: str, manifest: Manifest) -> None:
    if damaged:
        named = ", ".join(map(str, damaged[:_NAMED_UNITS]))
        more = f" and {len(damaged) - _NAMED_UNITS} more" if len(damaged) > _NAMED_UNITS else ""
        raise CorruptImage(f"image {manifest.sha256} is damaged {where}: units {named}{more}")
