"""Where a read writes."""

from collections.abc import Iterator


def writable_parts(into: memoryview, most_bytes: int) -> Iterator[tuple[int, memoryview]]:
    """What each request of a read fills, and where in `into` that begins. Raises ValueError as below."""
    into = writable_bytes(into)
    for start in range(0, len(into), most_bytes):
        yield start, into[start : start + most_bytes]


def writable_bytes(into: memoryview) -> memoryview:
    """`into` as bytes. Raises ValueError where nothing could be written to it."""
    if into.readonly:
        raise ValueError("the destination is read-only")
    return into.cast("B")
