"""Reads of a peer's GPU memory on the same host, by CUDA IPC; over TCP the peer says when and where.

A read asks for its range as a reader of shared memory does: the peer answers once the bytes are there, and
keeps their memory until it is told that the read has ended. Only meanwhile the peer's allocation is open.
"""

import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager, contextmanager

from rdmacast.client_link import ClientLink, open_link
from rdmacast.cuda_ipc_driver import IpcDriver
from rdmacast.cuda_ipc_memory import LentMemory
from rdmacast.errors import DeviceError, NotShared, ProtocolError
from rdmacast.settings import LinkSettings
from rdmacast.tcp import writable_bytes
from rdmacast.transport import Began, Link, PeerAddress
from rdmacast.verbs_memory import address_of
from rdmacast.waiting import run_in_thread
from rdmacast.wire import MAX_READ_BYTES


class OpenedAllocations:
    """Opens each allocation once for all reads that use it at the same time, in whatever thread."""

    def __init__(self, driver: IpcDriver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._opened: dict[bytes, tuple[int, int]] = {}  # by handle: where it is, and its users

    def __repr__(self) -> str:
        return f"OpenedAllocations({len(self._opened)})"

    @contextmanager
    def opened(self, handle: bytes) -> Iterator[int]:
        """Where the allocation begins. Raises DeviceError."""
        with self._lock:
            base, users = self._opened.get(handle) or (self._driver.open(handle), 0)
            self._opened[handle] = base, users + 1
        try:
            yield base
        finally:
            self._leave(handle)

    def _leave(self, handle: bytes) -> None:
        with self._lock:
            base, users = self._opened.pop(handle)
            if users > 1:
                self._opened[handle] = base, users - 1
            else:
                self._driver.close(base)


class CudaIpcLink:
    """A Link that copies from a GPU, controlled over TCP."""

    def __init__(
        self, link: ClientLink, driver: IpcDriver, opened: OpenedAllocations, executor: Executor | None
    ) -> None:
        self._link = link
        self._driver = driver
        self._opened = opened
        self._executor = executor
        self._received_bytes = 0

    def __repr__(self) -> str:
        return f"CudaIpcLink({self._opened!r}, {self._link!r})"

    @property
    def transport(self) -> str:
        return "cuda_ipc"

    @property
    def received_bytes(self) -> int:
        return self._received_bytes

    async def read_into(self, region: str, offset: int, into: memoryview, began: Began | None = None) -> None:
        into = writable_bytes(into)
        for start in range(0, len(into), MAX_READ_BYTES):
            await self._read(region, offset + start, into[start : start + MAX_READ_BYTES], began)

    async def aclose(self) -> None:
        await self._link.aclose()

    async def _read(self, region: str, offset: int, into: memoryview, began: Began | None) -> None:
        async with self._link.lent(region, offset, len(into)) as lent:
            if began is not None:
                began()
            if lent.offset + len(into) > lent.allocation_bytes:
                raise ProtocolError("a range of GPU memory ends outside its allocation")
            try:
                await run_in_thread(self._executor, lambda: self._copy(lent, into))
            except DeviceError as error:
                raise NotShared(f"the peer's GPU memory cannot be read here: {error}") from error
        self._received_bytes += len(into)

    def _copy(self, lent: LentMemory, into: memoryview) -> None:
        with self._opened.opened(lent.handle) as base:
            self._driver.copy(address_of(into), base + lent.offset, len(into))


class CudaIpcTransport:
    """Makes CudaIpcLinks for a process that can use a GPU by `driver`."""

    def __init__(
        self,
        secret: bytes,
        driver: IpcDriver,
        *,
        tls: ssl.SSLContext | None = None,
        executor: Executor | None = None,
        settings: LinkSettings | None = None,
    ) -> None:
        self._secret = secret
        self._driver = driver
        self._tls = tls
        self._executor = executor
        self._settings = settings or LinkSettings()
        self._opened = OpenedAllocations(driver)

    def __repr__(self) -> str:
        return f"CudaIpcTransport({self._opened!r})"

    @property
    def name(self) -> str:
        return "cuda_ipc"

    @asynccontextmanager
    async def connect(self, peer: PeerAddress) -> AsyncIterator[Link]:
        async with open_link(peer.url, self._secret, self._settings, tls=self._tls) as link:
            host = (await link.hello()).host
            if host != peer.host:
                raise ProtocolError(f"{peer.url} is on host {host!r}, not on {peer.host!r}")
            yield CudaIpcLink(link, self._driver, self._opened, self._executor)
