"""What both kinds of store share: digests as names, the marker file, running hashes of uploads."""

import asyncio
import json
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import ParamSpec, Protocol, TypeVar

from registry.errors import Conflict, InvalidRecord, StoreError

MARKER_FILE = "hypercast-store.json"
MAX_MARKER_BYTES = 64 * 1024
MAX_RUNNING_HASHES = 64
P = ParamSpec("P")
T = TypeVar("T")

_DIGEST = re.compile(r"[0-9a-f]{64}")


def check_digest(digest: str) -> str:
    """Return `digest`, or raise InvalidRecord: digests become file names."""
    if not _DIGEST.fullmatch(digest):
        raise InvalidRecord(f"not a SHA-256 digest of 64 hex digits: {digest[:80]!r}")
    return digest


def encode_marker(cluster: str) -> bytes:
    """The store's marker file."""
    return json.dumps({"cluster": cluster}).encode() + b"\n"


def decode_marker(raw: bytes, url: str) -> str:
    """The cluster id in a marker file. Raises StoreError."""
    try:
        marker = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{url}: {MARKER_FILE} is corrupt: {error}") from error
    if not isinstance(marker, dict) or not isinstance(marker.get("cluster"), str):
        raise StoreError(f"{url}: {MARKER_FILE} names no cluster")
    return marker["cluster"]


class Hash(Protocol):
    """A running SHA-256."""

    def update(self, data: bytes | bytearray | memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


class RunningHashes:
    """The SHA-256 of each unfinished upload so far, so that a resumed one need not be read again.

    Each is kept under a mark of the partial's state; one that has changed since is not offered.
    """

    def __init__(self) -> None:
        self._hashes: OrderedDict[str, tuple[object, Hash]] = OrderedDict()

    def take(self, digest: str, mark: object) -> Hash | None:
        """The hash of the partial in just this state, if known; it now belongs to the caller."""
        known, running = self._hashes.pop(digest, (None, None))
        return running if known == mark else None

    def keep(self, digest: str, mark: object, running: Hash) -> None:
        """Remember a hash for the next append; the oldest is forgotten when there are too many."""
        self._hashes[digest] = (mark, running)
        while len(self._hashes) > MAX_RUNNING_HASHES:
            self._hashes.popitem(last=False)

    def forget(self, digest: str) -> None:
        self._hashes.pop(digest, None)


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Like asyncio.to_thread, but a cancellation waits for the thread: its files stay in use until then."""
    return await _settled(asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs)))


async def _settled(task: "asyncio.Future[T]") -> T:
    """The task's result; if this is cancelled, the task is waited for first."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # so that it counts as seen
        raise


async def write_batched(
    chunks: AsyncIterator[bytes], write: Callable[[bytearray], None], batch_bytes: int
) -> None:
    """Hand `chunks` to `write`, which blocks, in batches: one is written while the next arrives.

    If `chunks` fails or the call is cancelled, what has come so far is written first: the client that
    went away has sent it and need not send it again.
    """
    pending = bytearray()
    writing = asyncio.ensure_future(asyncio.to_thread(write, bytearray()))
    try:
        async for chunk in chunks:
            pending += chunk
            if len(pending) >= batch_bytes:
                await _settled(writing)
                batch, pending = pending, bytearray()
                writing = asyncio.ensure_future(asyncio.to_thread(write, batch))
        await _settled(writing)
    except BaseException:
        # Bytes behind a batch that could not be written must not be written either.
        with suppress(StoreError, Conflict):
            await _settled(writing)
            await in_thread(write, pending)
        raise
    await in_thread(write, pending)
