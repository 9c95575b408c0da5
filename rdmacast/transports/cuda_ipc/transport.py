"""Reads of a peer's GPU memory on the same host, by CUDA IPC; over TCP the peer says when and where.

A read asks for its range as a reader of shared memory does: the peer answers once the bytes are there, and
keeps their memory until it is told that the read has ended. Only meanwhile the peer's allocation is open.
"""

import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager, contextmanager

from rdmacast.client_link import ClientLink
from rdmacast.controlled import ControlledLink, ControlledTransport
from rdmacast.cuda_ipc_driver import IpcDriver
from rdmacast.cuda_ipc_memory import LentMemory
from rdmacast.destination import writable_parts
from rdmacast.errors import DeviceError, NotShared, ProtocolError
from rdmacast.settings import LinkSettings
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


class CudaIpcLink(ControlledLink):
    """A Link that copies from a GPU, controlled over TCP."""

    transport = "cuda_ipc"

    def __init__(
        self, link: ClientLink, driver: IpcDriver, opened: OpenedAllocations, executor: Executor | None
    ) -> None:
        super().__init__(link)
        self._driver = driver
        self._opened = opened
        self._executor = executor

    def __repr__(self) -> str:
        return f"CudaIpcLink({self._opened!r}, {self._link!r})"

    async def read_into(self, region: str, offset: int, into: memoryview, began: Began | None = None) -> None:
        for start, part in writable_parts(into, MAX_READ_BYTES):
            await self._read(region, offset + start, part, began)

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


class CudaIpcTransport(ControlledTransport):
    """Makes CudaIpcLinks for a process that can use a GPU by `driver`."""

    name = "cuda_ipc"

    def __init__(
        self,
        secret: bytes,
        driver: IpcDriver,
        *,
        tls: ssl.SSLContext | None = None,
        executor: Executor | None = None,
        settings: LinkSettings | None = None,
    ) -> None:
        super().__init__(secret, tls, settings)
        self._driver = driver
        self._executor = executor
        self._opened = OpenedAllocations(driver)

    def __repr__(self) -> str:
        return f"CudaIpcTransport({self._opened!r})"

    @asynccontextmanager
    async def connect(self, peer: PeerAddress) -> AsyncIterator[Link]:
        async with self._control_on_host(peer) as link:
            yield CudaIpcLink(link, self._driver, self._opened, self._executor)
