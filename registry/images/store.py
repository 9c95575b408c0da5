"""The content-addressed store of images, manifests and assets: the seam, and `open_store`.

A blob's name is the SHA-256 of its bytes. Layout below the store's root, the same for every backend:

    hypercast-store.json      the cluster that the store belongs to
    blobs/<sha256>            complete, checked blobs
    partial/<sha256>          unfinished uploads (a file locally, a folder of parts elsewhere)
"""

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from registry.errors import InvalidRecord, StoreError
from registry.images.fsspec_store import FsspecStore
from registry.images.local_store import LocalStore


class BlobReader(Protocol):
    """A complete blob, read synchronously and from any number of threads at once. Close it after use."""

    @property
    def size(self) -> int: ...

    @property
    def is_direct(self) -> bool:
        """Whether a device writes large reads directly into the caller's buffer, where `cached` is None."""
        ...

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill `into` from `[offset, offset + len(into))`. Raises StoreError; ValueError out of range."""
        ...

    def cached(self, offset: int, nbytes: int) -> int | None:
        """Return a file descriptor with the range at the same offset if most of it is cached, else None."""
        ...

    def close(self) -> None:
        """Release the blob. Idempotent."""
        ...


class Blobs(Protocol):
    """The part of a store that a gateway uses.

    Every digest is checked to be 64 hex digits (InvalidRecord otherwise). A failure of the backend is a
    StoreError.
    """

    async def size(self, digest: str) -> int | None:
        """Return the bytes of a complete blob, None if the store lacks it."""
        ...

    async def read(self, digest: str, *, limit: int) -> bytes:
        """Return a small blob, checked. Raises NotFound, StoreError (over `limit`), CorruptImage."""
        ...

    async def partial_size(self, digest: str) -> int:
        """Return the bytes of an unfinished upload, 0 if there is none."""
        ...

    async def append(self, digest: str, offset: int, chunks: AsyncIterator[bytes], *, total: int) -> int:
        """Add bytes to an upload at `offset` (must equal partial_size); return the new partial size.

        At `total` the SHA-256 is checked and the blob becomes visible, atomically. If `chunks` fails or the
        call is cancelled, the received bytes are kept for the next append. If the blob is complete already,
        nothing is read and `total` returned. Raises Conflict (wrong offset, another append in progress, more
        than `total` bytes), CorruptImage (wrong digest: the partial is dropped), StoreFull.
        """
        ...

    async def delete(self, digest: str) -> None:
        """Remove a blob and its unfinished upload; do nothing if there is neither."""
        ...

    async def digests(self) -> list[str]:
        """Return the digests of all complete blobs, sorted."""
        ...

    async def last_used(self) -> dict[str, float | None]:
        """Return all complete blobs, each with the Unix time at which it was finished or last touched.

        The time is None where the backend does not record it.
        """
        ...

    async def touch(self, digest: str) -> None:
        """Record a use of a blob, where the backend can; do nothing if there is none."""
        ...

    async def partials(self) -> dict[str, float | None]:
        """Return all unfinished uploads, each with the Unix time of its last bytes.

        The time is None where the backend does not record it.
        """
        ...

    async def drop_partial(self, digest: str) -> bool:
        """Remove an unfinished upload, unless it is being written; return whether it was removed."""
        ...


class BlobStore(Blobs, Protocol):
    """The whole store."""

    @property
    def url(self) -> str: ...

    async def claim(self, cluster: str) -> str:
        """Mark the store as the cluster's unless it is marked already; return the marked id."""
        ...

    async def cluster(self) -> str | None:
        """Return the id of the cluster that the store belongs to, None if unclaimed.

        A node that reads its own cluster's id here reads the same store as the gateway.
        """
        ...

    def open_blob(self, digest: str) -> BlobReader:
        """Open a complete blob for reading (synchronous, for invokers). Raises NotFound, StoreError."""
        ...


_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


def open_store(url: str) -> BlobStore:
    """Return the store at a path, a `file://` URL or any fsspec URL. Raises StoreError, InvalidRecord."""
    if not url:
        raise InvalidRecord("the store's URL is empty")
    if not _SCHEME.match(url):
        return LocalStore(Path(url))
    if url.startswith("file:"):
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise InvalidRecord(f"a file URL is file:///absolute/path, not {url!r}")
        return LocalStore(Path(unquote(parts.path)))
    return FsspecStore(url)


__all__ = ["BlobReader", "BlobStore", "Blobs", "FsspecStore", "LocalStore", "StoreError", "open_store"]
