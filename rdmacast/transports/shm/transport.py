"""Reads on the same host: one copy from the region's file, once the server has exported the range.

The copy is `preadv` straight into the destination: it runs without the interpreter lock, is as fast
as copying from a mapping (each mapping pays its page faults anew), and where a file was shortened
against its contract it reads short instead of killing the process.
"""

import os
import ssl
import stat
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from pathlib import Path

from rdmacast.aio.threads import run_in_thread
from rdmacast.destination import writable_bytes
from rdmacast.errors import NotShared
from rdmacast.protocol.client_link import ClientLink
from rdmacast.protocol.handshake import Secret
from rdmacast.settings import LinkSettings
from rdmacast.transport import Check, Link, OnStart, PeerAddress
from rdmacast.transports.controlled import ControlledLink, ControlledTransport, decode_reply
from rdmacast.transports.shm.location import FileLocation

_Copy = Callable[[int, int, memoryview], None]  # from a file's offset on into memory

_INLINE_BYTES = 256 << 10  # copied faster than a thread is scheduled
_CALL_BYTES = 1 << 30  # Linux reads at most 2 GiB a call
_OPEN_TRIES = 3  # a file may be renamed between the reply and `open`


class _File:
    """An open file, closed once its link has released it and no copy uses it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._users = 1  # the link

    def __enter__(self) -> int:
        self._users += 1
        return self.number

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        self._users -= 1
        if not self._users:
            os.close(self.number)


class ShmLink(ControlledLink):
    """A Link that copies from files, controlled over TCP."""

    transport = "shm"

    def __init__(self, link: ClientLink, root: Path | None, executor: Executor | None) -> None:
        super().__init__(link)
        self._root = root
        self._executor = executor
        self._files: dict[str, tuple[bytes, _File]] = {}  # by region, with the reply that named it

    def __repr__(self) -> str:
        return f"ShmLink({len(self._files)} files, {self._link!r})"

    async def read_into(
        self, region: str, offset: int, into: memoryview, on_start: OnStart | None = None
    ) -> None:
        await self._copied(region, offset, into, _copy, on_start)

    async def read_checked(
        self,
        region: str,
        offset: int,
        into: memoryview,
        check: Check,
        piece_bytes: int,
        on_start: OnStart | None = None,
    ) -> Sequence[int]:
        damaged: list[int] = []

        def copy_checked(number: int, offset: int, into: memoryview) -> None:
            for start in range(0, len(into), piece_bytes):
                piece = into[start : start + piece_bytes]
                _copy(number, offset + start, piece)
                damaged.extend(check(offset + start, piece))

        await self._copied(region, offset, into, copy_checked, on_start)
        return damaged

    async def _copied(
        self, region: str, offset: int, into: memoryview, copy: _Copy, on_start: OnStart | None
    ) -> None:
        into = writable_bytes(into)
        if not into:
            return
        for _ in range(_OPEN_TRIES):
            async with self._link.export(self.transport, region, offset, len(into)) as reply:
                try:
                    file = self._file(region, reply)
                except FileNotFoundError:
                    continue
                if on_start is not None:
                    on_start()
                with file as number:
                    if len(into) <= _INLINE_BYTES:
                        copy(number, offset, into)
                    else:
                        await run_in_thread(copy, number, offset, into, executor=self._executor)
            self._received_bytes += len(into)
            return
        raise NotShared(f"the file of region {region} is not on this host")

    async def aclose(self) -> None:
        await super().aclose()
        files, self._files = self._files, {}
        for _, file in files.values():
            file.release()

    def _file(self, region: str, reply: bytes) -> _File:
        """Return the open file that the reply names. Raises FileNotFoundError, NotShared, ProtocolError."""
        known = self._files.get(region)
        if known is not None and known[0] == reply:
            return known[1]
        location = decode_reply(self._link, FileLocation.decode, reply)
        try:
            file = _File(_open_checked(location.path, location.nbytes, self._root))
        except FileNotFoundError:
            raise
        except OSError as error:
            raise NotShared(f"cannot open {location.path}: {error.strerror or error}") from error
        replaced = self._files.pop(region, None)
        if replaced is not None:
            replaced[1].release()
        self._files[region] = (reply, file)
        return file


class ShmTransport(ControlledTransport):
    """A Transport over shared memory. With `root`, only files below that folder are opened."""

    name = "shm"

    def __init__(
        self,
        secret: Secret,
        *,
        root: str | os.PathLike[str] | None = None,
        executor: Executor | None = None,
        tls: ssl.SSLContext | None = None,
        settings: LinkSettings | None = None,
    ) -> None:
        super().__init__(secret, tls, settings)
        self._root = Path(root).resolve() if root is not None else None
        self._executor = executor

    def __repr__(self) -> str:
        return f"ShmTransport(below {self._root or 'any folder'})"

    @asynccontextmanager
    async def connect(self, peer: PeerAddress) -> AsyncIterator[Link]:
        async with self._control_on_host(peer) as link:
            shared = ShmLink(link, self._root, self._executor)
            try:
                yield shared
            finally:
                await shared.aclose()


def _open_checked(path: str, nbytes: int, root: Path | None) -> int:
    """Open a file that the peer named, after checks. Raises OSError or NotShared."""
    if not Path(path).is_absolute():
        raise NotShared(f"{path} is not an absolute path")
    if root is not None and not Path(path).parent.resolve().is_relative_to(root):
        raise NotShared(f"{path} is outside the folder for shared images")
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise NotShared(f"{path} is not a regular file of our own")
        if status.st_size != nbytes:
            raise NotShared(f"{path} has {status.st_size} bytes, the region {nbytes}")
    except BaseException:
        os.close(file)
        raise
    return file


def _copy(file: int, offset: int, into: memoryview) -> None:
    done = 0
    while done < len(into):
        count = os.preadv(file, [into[done : done + _CALL_BYTES]], offset + done)
        if count == 0:
            raise NotShared(f"a region's file ends at {offset + done}")
        done += count
