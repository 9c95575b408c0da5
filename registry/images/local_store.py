"""A blob store in a local (or network-mounted) folder."""

import asyncio
import fcntl
import hashlib
import os
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

from rdmacast.aio.threads import run_in_thread
from registry.errors import Conflict, CorruptImage, NotFound, StoreFull
from registry.images.digests import (
    MARKER_FILE,
    MAX_MARKER_BYTES,
    RunningHash,
    UploadHashes,
    check_digest,
    decode_marker,
    encode_marker,
    read_blob,
    write_batched,
)
from registry.images.local_reader import LocalReader, translated

WRITE_BYTES = 1024 * 1024
READ_BYTES = 4 * 1024 * 1024


class LocalStore:
    """Blobs as files. Several processes may use one folder: an upload is protected by a file lock."""

    def __init__(self, root: Path, reader: Callable[[Path], LocalReader] = LocalReader) -> None:
        self._reader = reader
        self._root = root.absolute()
        self._blobs = self._root / "blobs"
        self._partial = self._root / "partial"
        self._hashes = UploadHashes()
        with translated(self._root):
            self._blobs.mkdir(parents=True, exist_ok=True)
            self._partial.mkdir(exist_ok=True)

    def __repr__(self) -> str:
        return f"<LocalStore {self._root}>"

    @property
    def url(self) -> str:
        return self._root.as_uri()

    async def size(self, digest: str) -> int | None:
        return await asyncio.to_thread(_size, self._blobs / check_digest(digest))

    async def read(self, digest: str, *, limit: int) -> bytes:
        return await asyncio.to_thread(self._read, digest, limit)

    def _read(self, digest: str, limit: int) -> bytes:
        return read_blob(self.open_blob(digest), digest, limit, str(self._root))

    async def partial_size(self, digest: str) -> int:
        return await asyncio.to_thread(_size, self._partial / check_digest(digest)) or 0

    async def append(self, digest: str, offset: int, chunks: AsyncIterator[bytes], *, total: int) -> int:
        if await self.size(digest) is not None:
            return total
        upload = _Upload(self._partial / digest, digest, total, self._hashes)
        try:
            await run_in_thread(upload.open, offset)
            await write_batched(chunks, upload.write, WRITE_BYTES)
            if upload.size == total:
                await run_in_thread(upload.finish, self._blobs / digest)
            return upload.size
        except StoreFull:
            await run_in_thread(upload.drop)
            raise
        finally:
            upload.close()

    async def delete(self, digest: str) -> None:
        check_digest(digest)
        self._hashes.discard(digest)
        await asyncio.to_thread(self._delete, digest)

    def _delete(self, digest: str) -> None:
        with translated(self._root):
            (self._blobs / digest).unlink(missing_ok=True)
            (self._partial / digest).unlink(missing_ok=True)

    async def digests(self) -> list[str]:
        return await asyncio.to_thread(self._list)

    def _list(self) -> list[str]:
        with translated(self._root):
            return sorted(entry.name for entry in self._blobs.iterdir() if len(entry.name) == 64)

    async def last_used(self) -> dict[str, float | None]:
        return await asyncio.to_thread(self._times, self._blobs)

    async def partials(self) -> dict[str, float | None]:
        return await asyncio.to_thread(self._times, self._partial)

    def _times(self, folder: Path) -> dict[str, float | None]:
        times: dict[str, float | None] = {}
        with translated(self._root), os.scandir(folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # removed since it was listed
                    if len(entry.name) == 64:
                        times[entry.name] = entry.stat().st_mtime
        return times

    async def touch(self, digest: str) -> None:
        await asyncio.to_thread(self._touch, self._blobs / check_digest(digest))

    def _touch(self, path: Path) -> None:
        with translated(path), suppress(FileNotFoundError):
            os.utime(path)

    async def drop_partial(self, digest: str) -> bool:
        return await asyncio.to_thread(self._drop_partial, self._partial / check_digest(digest))

    def _drop_partial(self, path: Path) -> bool:
        with translated(path):
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                return False
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            except (BlockingIOError, FileNotFoundError):  # being written, or finished meanwhile
                return False
            finally:
                os.close(descriptor)
        self._hashes.discard(path.name)
        return True

    async def claim(self, cluster: str) -> str:
        return await asyncio.to_thread(self._claim, cluster)

    def _claim(self, cluster: str) -> str:
        with translated(self._root):
            draft = self._root / f".{MARKER_FILE}.{uuid.uuid4().hex}"
            draft.write_bytes(encode_marker(cluster))
            try:
                # A link, unlike a rename, fails if another process was first; a marker is never read half.
                with suppress(FileExistsError):
                    os.link(draft, self._root / MARKER_FILE)
            finally:
                draft.unlink()
        return self._cluster() or cluster

    async def cluster(self) -> str | None:
        return await asyncio.to_thread(self._cluster)

    def _cluster(self) -> str | None:
        with translated(self._root):
            try:
                with open(self._root / MARKER_FILE, "rb") as file:
                    raw = file.read(MAX_MARKER_BYTES)
            except FileNotFoundError:
                return None
        return decode_marker(raw, self.url)

    def open_blob(self, digest: str) -> LocalReader:
        path = self._blobs / check_digest(digest)
        with translated(self._root):
            try:
                return self._reader(path)
            except FileNotFoundError as error:
                raise NotFound(f"no blob {digest} in the store {self._root}") from error


class _Upload:
    """The partial file of one append, locked while open; all but `close` block and run in threads."""

    def __init__(self, path: Path, digest: str, total: int, hashes: UploadHashes) -> None:
        self._path = path
        self._digest = digest
        self._total = total
        self._hashes = hashes
        self._running: RunningHash = hashlib.sha256()
        self._descriptor: int | None = None
        self._ended = True
        self.size = 0

    def open(self, offset: int) -> None:
        """Lock the partial file and check that the upload may continue. Raises Conflict, StoreFull."""
        with translated(self._path):
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise Conflict(f"another upload of {self._digest} is in progress") from error
            status = os.fstat(self._descriptor)
            # Between open and flock the file may have been renamed to the blob, or deleted.
            if not self._path.exists() or self._path.stat().st_ino != status.st_ino:
                raise Conflict(f"the upload of {self._digest} has ended meanwhile")
            self.size = status.st_size
            if self.size > self._total:
                self._path.unlink()
                raise CorruptImage(f"the upload of {self._digest} was longer than {self._total} bytes")
            if offset != self.size:
                raise Conflict(
                    f"the upload of {self._digest} continues at {self.size} bytes, not at {offset}"
                )
            room = os.fstatvfs(self._descriptor)
            free, needed = room.f_bavail * room.f_frsize, self._total - self.size
            if needed > free:
                raise StoreFull(f"the store has {free} bytes free, the upload needs {needed}")
            self._running = self._hashes.pop(self._digest, _mark(status)) or self._hash_again()
            self._ended = False

    def _hash_again(self) -> RunningHash:
        assert self._descriptor is not None
        running = hashlib.sha256()
        buffer = memoryview(bytearray(min(READ_BYTES, self.size)))
        done = 0
        while done < self.size:
            got = os.preadv(self._descriptor, [buffer[: self.size - done]], done)
            running.update(buffer[:got])
            done += got
        return running

    def write(self, data: bytearray) -> None:
        if self.size + len(data) > self._total:
            raise Conflict(f"the upload of {self._digest} is longer than its {self._total} bytes")
        assert self._descriptor is not None
        view = memoryview(data)
        with translated(self._path):
            while view:
                written = os.pwrite(self._descriptor, view, self.size)
                self._running.update(view[:written])
                self.size += written
                view = view[written:]

    def finish(self, blob: Path) -> None:
        """Check the digest, sync the file to disk, and then make the blob visible."""
        assert self._descriptor is not None
        self._ended = True
        with translated(self._path):
            if self._running.hexdigest() != self._digest:
                self._path.unlink()
                raise CorruptImage(f"the upload does not match its digest {self._digest}; start it again")
            os.fsync(self._descriptor)
            self._path.rename(blob)
            for folder in (blob.parent, self._path.parent):
                descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)

    def drop(self) -> None:
        """Remove the partial file, which would only take space on a full disk."""
        self._ended = True
        with translated(self._path):
            self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Unlock; the written bytes stay for the next append. Idempotent."""
        if self._descriptor is None:
            return
        if not self._ended:
            self._hashes.put(self._digest, _mark(os.fstat(self._descriptor)), self._running)
        os.close(self._descriptor)
        self._descriptor = None


def _mark(status: os.stat_result) -> tuple[int, ...]:
    """Return the state by which a partial file that another process has written since is detected."""
    return status.st_ino, status.st_size, status.st_mtime_ns


def _size(path: Path) -> int | None:
    with translated(path):
        try:
            return path.stat().st_size
        except FileNotFoundError:
            return None
