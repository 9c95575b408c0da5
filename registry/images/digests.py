"""The common part of both stores: digests as names, the marker file, running hashes of uploads."""

import asyncio
import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import closing, suppress
from typing import Protocol

from rdmacast.aio.shielded import run_shielded
from rdmacast.aio.threads import run_in_thread
from registry.errors import Conflict, CorruptImage, InvalidRecord, StoreError

MARKER_FILE = "hypercast-store.json"
MAX_MARKER_BYTES = 64 * 1024
MAX_RUNNING_HASHES = 64

DIGEST = re.compile(r"[0-9a-f]{64}")


def check_digest(digest: str) -> str:
    """Return `digest`. Raises InvalidRecord if it is malformed: digests become file names."""
    if not DIGEST.fullmatch(digest):
        raise InvalidRecord(f"not a SHA-256 digest of 64 hex digits: {digest[:80]!r}")
    return digest


def encode_marker(cluster: str) -> bytes:
    """Return the store's marker file."""
    return json.dumps({"cluster": cluster}).encode() + b"\n"


def decode_marker(raw: bytes, url: str) -> str:
    """Return the cluster id in a marker file. Raises StoreError."""
    try:
        marker = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{url}: {MARKER_FILE} is corrupt: {error}") from error
    if not isinstance(marker, dict) or not isinstance(marker.get("cluster"), str):
        raise StoreError(f"{url}: {MARKER_FILE} names no cluster")
    return marker["cluster"]


class SizedReader(Protocol):
    """The part of a BlobReader that `read_blob` uses."""

    @property
    def size(self) -> int: ...

    def read_into(self, offset: int, into: memoryview) -> None: ...

    def close(self) -> None: ...


def read_blob(reader: SizedReader, digest: str, limit: int, where: str) -> bytes:
    """Return a small blob, checked, and close its reader. Raises StoreError (over `limit`), CorruptImage."""
    with closing(reader):
        if reader.size > limit:
            raise StoreError(f"blob {digest} has {reader.size} bytes, more than the limit of {limit}")
        content = bytearray(reader.size)
        reader.read_into(0, memoryview(content))
    if hashlib.sha256(content).hexdigest() != digest:
        raise CorruptImage(f"blob {digest} is damaged in the store {where}")
    return bytes(content)


class RunningHash(Protocol):
    """A running SHA-256."""

    def update(self, data: bytes | bytearray | memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


class UploadHashes:
    """The SHA-256 of each unfinished upload so far, so that a resumed one need not be read again.

    Each is kept under a mark of the partial's state; if the partial has changed since, its hash is not
    returned.
    """

    def __init__(self) -> None:
        self._hashes: OrderedDict[str, tuple[object, RunningHash]] = OrderedDict()

    def pop(self, digest: str, mark: object) -> RunningHash | None:
        """Remove and return the hash of the partial in exactly this state, if known."""
        known, running = self._hashes.pop(digest, (None, None))
        return running if known == mark else None

    def put(self, digest: str, mark: object, running: RunningHash) -> None:
        """Keep a hash for the next append; beyond the limit the oldest is dropped."""
        self._hashes[digest] = (mark, running)
        while len(self._hashes) > MAX_RUNNING_HASHES:
            self._hashes.popitem(last=False)

    def discard(self, digest: str) -> None:
        self._hashes.pop(digest, None)


async def write_batched(
    chunks: AsyncIterator[bytes], write: Callable[[bytearray], None], batch_bytes: int
) -> None:
    """Pass `chunks` to `write`, which blocks, in batches: one is written while the next arrives.

    If `chunks` fails or the call is cancelled, the received bytes are written first, so that the client need
    not send them again.
    """
    pending = bytearray()
    writing = asyncio.ensure_future(asyncio.to_thread(write, bytearray()))
    try:
        async for chunk in chunks:
            pending += chunk
            if len(pending) >= batch_bytes:
                await run_shielded(writing)
                batch, pending = pending, bytearray()
                writing = asyncio.ensure_future(asyncio.to_thread(write, batch))
        await run_shielded(writing)
    except BaseException:
        # Bytes behind a batch that could not be written must not be written either.
        with suppress(StoreError, Conflict):
            await run_shielded(writing)
            await run_in_thread(write, pending)
        raise
    await run_in_thread(write, pending)
