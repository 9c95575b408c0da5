"""Checks of an image's bytes against the checksums of its units."""

import xxhash

from registry.images.manifest import UNIT_BYTES, Manifest

CHECKSUM_BYTES = 16


def unit_checksums(view: memoryview) -> bytes:
    """Return the concatenated checksums of the units of a range that starts at a unit's start."""
    return b"".join(
        xxhash.xxh3_128_digest(view[start : start + UNIT_BYTES]) for start in range(0, len(view), UNIT_BYTES)
    )


def check_units(manifest: Manifest, offset: int, view: memoryview) -> list[int]:
    """Return the indices of the damaged units in `[offset, offset + len(view))`.

    The range must start at a unit's start and end at a unit's end or the image's.
    """
    end = offset + len(view)
    if offset % UNIT_BYTES or not 0 <= offset <= end <= manifest.nbytes:
        raise ValueError(f"[{offset}, {end}) does not start at a unit of an image of {manifest.nbytes} bytes")
    if end % UNIT_BYTES and end != manifest.nbytes:
        raise ValueError(f"[{offset}, {end}) does not end at a unit's end")
    first = offset // UNIT_BYTES
    found = unit_checksums(view)
    expected = manifest.units[first * CHECKSUM_BYTES : first * CHECKSUM_BYTES + len(found)]
    return [
        first + at // CHECKSUM_BYTES
        for at in range(0, len(found), CHECKSUM_BYTES)
        if found[at : at + CHECKSUM_BYTES] != expected[at : at + CHECKSUM_BYTES]
    ]
