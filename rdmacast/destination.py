"""Destinations of reads."""

from collections.abc import Iterator


def writable_parts(into: memoryview, most_bytes: int) -> Iterator[tuple[int, memoryview]]:
    """Yield the offset and the view of each part of `into`, at most `most_bytes` long. Raises ValueError."""
    into = writable_bytes(into)
    for start in range(0, len(into), most_bytes):
        yield start, into[start : start + most_bytes]


def writable_bytes(into: memoryview) -> memoryview:
    """Return `into` as bytes. Raises ValueError if it is read-only."""
    if into.readonly:
        raise ValueError("the destination is read-only")
    return into.cast("B")
