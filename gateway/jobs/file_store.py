"""Files as parts of some megabytes, each a blob of the store: none is held in memory whole."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence

from gateway.core.errors import Unavailable
from registry.errors import Conflict, NotFound
from registry.images.store import Blobs
from registry.records.batch import FilePart

PART_BYTES = 4 << 20
_TRIES, _RETRY_S = 20, 0.1


async def store_part(blobs: Blobs, data: bytes) -> FilePart:
    """Store bytes as a part. Raises StoreError, Unavailable."""
    digest = await asyncio.to_thread(_digest, data)
    for _ in range(_TRIES):
        if await blobs.size(digest) is not None:
            await blobs.touch(digest)  # it may be unused, and due for collection
            break
        try:
            offset = await blobs.partial_size(digest)
            if await blobs.append(digest, offset, _once(data[offset:]), total=len(data)) == len(data):
                break
        except Conflict:  # another upload writes the same bytes
            await asyncio.sleep(_RETRY_S)
    else:
        raise Unavailable("the store is busy with the same bytes: retry", code="busy")
    return FilePart(digest=digest, size=len(data))


async def store_file(blobs: Blobs, chunks: AsyncIterator[bytes]) -> tuple[FilePart, ...]:
    """Store the bytes that arrive as parts. Raises StoreError, Unavailable, and what `chunks` raises."""
    parts: list[FilePart] = []
    buffer = bytearray()
    async for chunk in chunks:
        buffer += chunk
        while len(buffer) >= PART_BYTES:
            parts.append(await store_part(blobs, bytes(buffer[:PART_BYTES])))
            del buffer[:PART_BYTES]
    if buffer:
        parts.append(await store_part(blobs, bytes(buffer)))
    return tuple(parts)


async def read_parts(blobs: Blobs, parts: Sequence[FilePart], offset: int = 0) -> AsyncIterator[bytes]:
    """Yield the bytes of a file from `offset`, part by part. Raises NotFound, StoreError."""
    for part in parts:
        if offset >= part.size:
            offset -= part.size
            continue
        data = await blobs.read(part.digest, limit=max(PART_BYTES, part.size))
        if len(data) != part.size:
            raise NotFound(f"the store has other bytes for {part.digest}")
        yield data[offset:]
        offset = 0


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
