"""A blob store behind any fsspec URL (`s3://`, `gs://`, `memory://`, …).

Object stores cannot append, so each append writes one object below `partial/<digest>/`, named by its offset;
any gateway can continue where another stopped. The last one reads the parts once more, in order, into the
blob under a draft name, and then moves it into place.
"""

import asyncio
import hashlib
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import fsspec

from rdmacast.aio.threads import run_in_thread
from registry.errors import Conflict, CorruptImage, NotFound, StoreError
from registry.images.digests import (
    MARKER_FILE,
    RunningHash,
    UploadHashes,
    check_digest,
    decode_marker,
    encode_marker,
    read_blob,
    write_batched,
)

WRITE_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class _UploadPart:
    path: str
    offset: int
    nbytes: int


class FsspecStore:
    """Blobs as objects.

    Concurrent uploads of one digest through different gateways are not excluded (object stores have no
    locks), but are harmless: the parts' offsets and the digest are checked.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        try:
            self._fs, root = fsspec.core.url_to_fs(self._url)
        except (ImportError, ValueError, OSError) as error:
            # An unknown scheme, or one for which a package is missing: fsspec's message names it.
            raise StoreError(f"cannot use the store {url}: {error}") from error
        self._root = root.rstrip("/")
        self._hashes = UploadHashes()
        self._busy: set[str] = set()

    def __repr__(self) -> str:
        return f"<FsspecStore {self._url}>"

    @property
    def url(self) -> str:
        return self._url

    def _blob(self, digest: str) -> str:
        return f"{self._root}/blobs/{check_digest(digest)}"

    def _partial(self, digest: str) -> str:
        return f"{self._root}/partial/{check_digest(digest)}"

    async def size(self, digest: str) -> int | None:
        return await asyncio.to_thread(self._size, self._blob(digest))

    def _size(self, path: str) -> int | None:
        with _translated(self._url):
            try:
                return int(self._fs.info(path)["size"])
            except FileNotFoundError:
                return None

    async def read(self, digest: str, *, limit: int) -> bytes:
        return await asyncio.to_thread(self._read, digest, limit)

    def _read(self, digest: str, limit: int) -> bytes:
        return read_blob(self.open_blob(digest), digest, limit, self._url)

    async def partial_size(self, digest: str) -> int:
        parts = await asyncio.to_thread(self._parts, digest)
        return sum(part.nbytes for part in parts)

    def _parts(self, digest: str) -> list[_UploadPart]:
        """Return the parts that follow one another from 0 on; others, left over from a race, are ignored."""
        with _translated(self._url):
            try:
                entries = self._fs.ls(self._partial(digest), detail=True, refresh=True)
            except FileNotFoundError:
                return []
        found = []
        for entry in entries:
            offset = entry["name"].rpartition("/")[2].partition("-")[0]
            if offset.isdigit() and entry["size"]:
                found.append(_UploadPart(entry["name"], int(offset), int(entry["size"])))
        parts: list[_UploadPart] = []
        position = 0
        for part in sorted(found, key=lambda part: (part.offset, part.path)):
            if part.offset == position:
                parts.append(part)
                position += part.nbytes
        return parts

    async def append(self, digest: str, offset: int, chunks: AsyncIterator[bytes], *, total: int) -> int:
        check_digest(digest)
        if digest in self._busy:
            raise Conflict(f"another upload of {digest} is in progress")
        self._busy.add(digest)
        try:
            if await self.size(digest) is not None:
                return total
            return await self._append(digest, offset, chunks, total)
        finally:
            self._busy.discard(digest)

    async def _append(self, digest: str, offset: int, chunks: AsyncIterator[bytes], total: int) -> int:
        parts = await asyncio.to_thread(self._parts, digest)
        size = sum(part.nbytes for part in parts)
        if offset != size:
            raise Conflict(f"the upload of {digest} continues at {size} bytes, not at {offset}")
        running = self._hashes.pop(digest, tuple(parts))
        if running is None:
            running = await run_in_thread(self._hash_again, parts)
        path = f"{self._partial(digest)}/{offset:020d}-{uuid.uuid4().hex[:12]}"
        writer = _PartWriter(self._fs, self._url, path, running, total - offset)
        try:
            await write_batched(chunks, writer.write, WRITE_BYTES)
        finally:
            # A part becomes visible when it is closed.
            await run_in_thread(writer.close)
            if writer.nbytes:
                parts.append(_UploadPart(path, offset, writer.nbytes))
            self._hashes.put(digest, tuple(parts), running)
        size += writer.nbytes
        if size >= total:
            self._hashes.discard(digest)
            await run_in_thread(self._finish, digest, parts, running, size == total)
        return size

    def _hash_again(self, parts: list[_UploadPart]) -> RunningHash:
        running = hashlib.sha256()
        for piece in self._pieces(parts):
            running.update(piece)
        return running

    def _pieces(self, parts: list[_UploadPart]) -> Iterator[bytes]:
        with _translated(self._url):
            for part in parts:
                with self._fs.open(part.path, "rb") as file:
                    while piece := file.read(WRITE_BYTES):
                        yield piece

    def _finish(self, digest: str, parts: list[_UploadPart], running: RunningHash, whole: bool) -> None:
        with _translated(self._url):
            if not whole or running.hexdigest() != digest:
                self._remove(self._partial(digest))
                raise CorruptImage(f"the upload does not match its digest {digest}; start it again")
            draft = f"{self._root}/draft/{digest}-{uuid.uuid4().hex[:12]}"
            self._fs.makedirs(f"{self._root}/draft", exist_ok=True)
            self._fs.makedirs(f"{self._root}/blobs", exist_ok=True)
            try:
                with self._fs.open(draft, "wb") as file:
                    for piece in self._pieces(parts):
                        file.write(piece)
                self._fs.mv(draft, self._blob(digest))
            except BaseException:
                self._remove(draft)
                raise
            self._remove(self._partial(digest))

    def _remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.rm(path, recursive=True)

    async def delete(self, digest: str) -> None:
        self._hashes.discard(check_digest(digest))
        await asyncio.to_thread(self._delete, digest)

    def _delete(self, digest: str) -> None:
        with _translated(self._url):
            self._remove(self._blob(digest))
            self._remove(self._partial(digest))

    async def digests(self) -> list[str]:
        return await asyncio.to_thread(self._list)

    def _list(self) -> list[str]:
        with _translated(self._url):
            try:
                names = self._fs.ls(f"{self._root}/blobs", detail=False, refresh=True)
            except FileNotFoundError:
                return []
        return sorted(name for name in (path.rpartition("/")[2] for path in names) if len(name) == 64)

    async def last_used(self) -> dict[str, float | None]:
        # Objects cannot be touched, so the time of writing does not show the last use.
        return dict.fromkeys(await self.digests())

    async def touch(self, digest: str) -> None:
        check_digest(digest)

    async def partials(self) -> dict[str, float | None]:
        return await asyncio.to_thread(self._list_partials)

    def _list_partials(self) -> dict[str, float | None]:
        times: dict[str, float | None] = {}
        with _translated(self._url):
            try:
                folders = self._fs.ls(f"{self._root}/partial", detail=False, refresh=True)
            except FileNotFoundError:
                return {}
            for folder in folders:
                name = folder.rstrip("/").rpartition("/")[2]
                if len(name) == 64:
                    times[name] = self._last_part(folder)
        return times

    def _last_part(self, folder: str) -> float | None:
        """Return the time at which the last part of an upload was written."""
        try:
            parts = self._fs.ls(folder, detail=False, refresh=True)
            return max((self._fs.modified(part).timestamp() for part in parts), default=None)
        except (FileNotFoundError, NotImplementedError):  # removed meanwhile, or a backend without times
            return None

    async def drop_partial(self, digest: str) -> bool:
        """Remove an unfinished upload, unless this process is writing it.

        Writers of other processes are not known; they show by the times of their parts.
        """
        path = self._partial(digest)
        if digest in self._busy:
            return False
        self._hashes.discard(digest)
        return await asyncio.to_thread(self._drop, path)

    def _drop(self, path: str) -> bool:
        with _translated(self._url):
            there = bool(self._fs.exists(path))
            self._remove(path)
            return there

    async def claim(self, cluster: str) -> str:
        return await asyncio.to_thread(self._claim, cluster)

    def _claim(self, cluster: str) -> str:
        if (owner := self._cluster()) is not None:
            return owner
        with _translated(self._url):
            self._fs.makedirs(self._root, exist_ok=True)
            self._fs.pipe_file(f"{self._root}/{MARKER_FILE}", encode_marker(cluster))
        # Two clusters that claim at once both read the marker written last.
        return self._cluster() or cluster

    async def cluster(self) -> str | None:
        return await asyncio.to_thread(self._cluster)

    def _cluster(self) -> str | None:
        with _translated(self._url):
            try:
                raw = self._fs.cat_file(f"{self._root}/{MARKER_FILE}")
            except FileNotFoundError:
                return None
        return decode_marker(raw, self._url)

    def open_blob(self, digest: str) -> "FsspecReader":
        path = self._blob(digest)
        size = self._size(path)
        if size is None:
            raise NotFound(f"no blob {digest} in the store {self._url}")
        return FsspecReader(self._fs, path, size)


class FsspecReader:
    """A blob read by ranges; each read is a request of its own, so threads do not wait for each other."""

    def __init__(self, fs: Any, path: str, size: int) -> None:
        self._fs = fs
        self._path = path
        self._size = size

    @property
    def size(self) -> int:
        return self._size

    @property
    def is_direct(self) -> bool:
        return False

    def cached(self, offset: int, nbytes: int) -> int | None:
        return None

    def read_into(self, offset: int, into: memoryview) -> None:
        end = offset + len(into)
        if not 0 <= offset <= end <= self._size:
            raise ValueError(f"[{offset}, {end}) is not within {self._size} bytes")
        if not into:
            return
        with _translated(self._path):
            data = self._fs.cat_file(self._path, start=offset, end=end)
        if len(data) != len(into):
            raise StoreError(f"{self._path}: read {len(data)} bytes of {len(into)}")
        into[:] = data

    def close(self) -> None:
        """Do nothing: no resource is held."""


class _PartWriter:
    """The object that one append writes; opened with its first byte."""

    def __init__(self, fs: Any, url: str, path: str, running: RunningHash, room: int) -> None:
        self._fs = fs
        self._url = url
        self._path = path
        self._running = running
        self._room = room
        self._file: Any = None
        self.nbytes = 0

    def write(self, data: bytearray) -> None:
        if self.nbytes + len(data) > self._room:
            raise Conflict(f"the upload is longer than its declared size: {self._path}")
        if not data:
            return
        with _translated(self._url):
            if self._file is None:
                self._fs.makedirs(self._path.rpartition("/")[0], exist_ok=True)
                self._file = self._fs.open(self._path, "wb")
            self._file.write(bytes(data))
        self._running.update(data)
        self.nbytes += len(data)

    def close(self) -> None:
        if self._file is not None:
            with _translated(self._url):
                self._file.close()


@contextmanager
def _translated(where: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"{where}: {error}") from error
