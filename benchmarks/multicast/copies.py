"""Plain copies of the source's memory, checked or not: the limit for a cast within one host."""

import mmap
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.multicast.messages import CastFinished
from benchmarks.multicast.rank import Bytes
from registry.images.manifest import UNIT_BYTES
from registry.images.verify import CHECKSUM_BYTES, unit_checksums

COPY, COPY_CHECKED, READ_CHECKED = "copy", "copy-checked", "read-checked"
CHECKED = (COPY_CHECKED, READ_CHECKED)
COPIES = (COPY, *CHECKED)

_ReadRange = Callable[[int, int], object]  # reads [start, end)


class DamagedUnit(Exception):
    """A unit does not match its checksum."""


def copy_as(name: str, source: Path, into: Bytes, units: bytes) -> CastFinished:
    """Run one of COPIES on a file that is in memory."""
    if name == READ_CHECKED:
        return read(source, into, units)
    return copy(source, into, units if name == COPY_CHECKED else None)


def copy(source: Path, into: Bytes, units: bytes | None) -> CastFinished:
    """Copy unit by unit; with `units`, verify each unit while it is in the processor's cache.

    The file is mapped and pre-faulted before the clock starts.
    """
    with source.open("rb") as file:
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        mapped = mmap.mmap(file.fileno(), into.nbytes, flags=flags, prot=mmap.PROT_READ)
    mapped_bytes = np.frombuffer(mapped, np.uint8)
    return _timed(lambda start, end: np.copyto(into[start:end], mapped_bytes[start:end]), into, units)


def read(source: Path, into: Bytes, units: bytes) -> CastFinished:
    """Do the same by reading a file that this process has not mapped, which costs less than mapping it."""
    with source.open("rb") as file:
        number = file.fileno()
        return _timed(lambda start, end: os.preadv(number, [into.data[start:end]], start), into, units)


def _timed(read_range: _ReadRange, into: Bytes, units: bytes | None) -> CastFinished:
    started_s = time.monotonic()
    for start in range(0, into.nbytes, UNIT_BYTES):
        end = min(start + UNIT_BYTES, into.nbytes)
        read_range(start, end)
        if units is not None and mismatched_units(units, start, into.data[start:end]):
            raise DamagedUnit(f"unit {start // UNIT_BYTES} does not match its checksum")
    return CastFinished(started_s=started_s, ended_s=time.monotonic())


def mismatched_units(units: bytes, offset: int, view: memoryview) -> Sequence[int]:
    """Return the first unit of `[offset, offset + len(view))` if any unit there fails its checksum."""
    first, found = offset // UNIT_BYTES, unit_checksums(view)
    expected = units[first * CHECKSUM_BYTES : first * CHECKSUM_BYTES + len(found)]
    return () if found == expected else (first,)
