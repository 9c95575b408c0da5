"""What a cast within one host is held to: plain copies of the source's memory, checked or not."""

import mmap
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.crew_member import Bytes
from benchmarks.crew_messages import Done
from registry.images.manifest import UNIT_BYTES
from registry.images.verify import CHECKSUM_BYTES, unit_checksums

COPY, COPY_CHECKED, READ_CHECKED = "copy", "copy-checked", "read-checked"
CHECKED = (COPY_CHECKED, READ_CHECKED)
COPIES = (COPY, *CHECKED)

_Take = Callable[[int, int], object]  # brings [start, end)


class Damaged(Exception):
    """A unit is not as its checksum tells."""


def copy_as(name: str, source: Path, into: Bytes, units: bytes) -> Done:
    """One of COPIES of a file that is in memory."""
    if name == READ_CHECKED:
        return read(source, into, units)
    return copy(source, into, units if name == COPY_CHECKED else None)


def copy(source: Path, into: Bytes, units: bytes | None) -> Done:
    """Copy unit by unit; with `units` each is checked while it is in the cache.

    The file is mapped, all its pages too, before the clock starts.
    """
    with source.open("rb") as file:
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        mapped = mmap.mmap(file.fileno(), into.nbytes, flags=flags, prot=mmap.PROT_READ)
    given = np.frombuffer(mapped, np.uint8)
    return _timed(lambda start, end: np.copyto(into[start:end], given[start:end]), into, units)


def read(source: Path, into: Bytes, units: bytes) -> Done:
    """The same of a file that this process has not mapped: it is read, which takes less than to map it."""
    with source.open("rb") as file:
        number = file.fileno()
        return _timed(lambda start, end: os.preadv(number, [into.data[start:end]], start), into, units)


def _timed(take: _Take, into: Bytes, units: bytes | None) -> Done:
    began_s = time.monotonic()
    for start in range(0, into.nbytes, UNIT_BYTES):
        end = min(start + UNIT_BYTES, into.nbytes)
        take(start, end)
        if units is not None and damaged_units(units, start, into.data[start:end]):
            raise Damaged(f"unit {start // UNIT_BYTES} is not as it should be")
    return Done(began_s=began_s, ended_s=time.monotonic())


def damaged_units(units: bytes, offset: int, view: memoryview) -> Sequence[int]:
    """The first unit of `[offset, offset + len(view))`, if any in there is not as `units` tell."""
    first, found = offset // UNIT_BYTES, unit_checksums(view)
    expected = units[first * CHECKSUM_BYTES : first * CHECKSUM_BYTES + len(found)]
    return () if found == expected else (first,)
