"""Reads of a peer's GPU memory on the same host, by CUDA IPC, controlled over TCP.

The peer exports the range once its bytes are present and keeps their memory until the read has ended; the
peer's allocation is open only during the read.
"""

import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from rdmacast.aio.threads import run_in_thread
from rdmacast.destination import writable_parts
from rdmacast.errors import DeviceError, NotShared, ProtocolError
from rdmacast.protocol.client_link import ClientLink
from rdmacast.protocol.handshake import Secret
from rdmacast.protocol.wire import MAX_READ_BYTES
from rdmacast.settings import LinkSettings
from rdmacast.transport import Link, OnStart, PeerAddress
from rdmacast.transports.controlled import ControlledLink, ControlledTransport, decode_reply
from rdmacast.transports.cuda_ipc.driver import IpcDriver
from rdmacast.transports.cuda_ipc.memory import CudaIpcMemory
from rdmacast.transports.verbs.memory import address_of


class OpenedAllocations:
    """Allocations that are open, each once for all concurrent reads, in any thread."""

    def __init__(self, driver: IpcDriver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._opened: dict[bytes, tuple[int, int]] = {}  # by handle: where it is, and its users

    def __repr__(self) -> str:
        return f"OpenedAllocations({len(self._opened)})"

    @contextmanager
    def opened(self, handle: bytes) -> Iterator[int]:
        """Open the allocation; yields its base address here. Raises DeviceError."""
        with self._lock:
            base, users = self._opened.get(handle) or (self._driver.open(handle), 0)
            self._opened[handle] = base, users + 1
        try:
            yield base
        finally:
            self._release(handle)

    def _release(self, handle: bytes) -> None:
        with self._lock:
            base, users = self._opened.pop(handle)
            if users > 1:
                self._opened[handle] = base, users - 1
            else:
                self._driver.close(base)


class CudaIpcLink(ControlledLink):
    """A Link that copies from a GPU, controlled over TCP."""

    transport = "cuda_ipc"

    def __init__(self, link: ClientLink, driver: IpcDriver, opened: OpenedAllocations) -> None:
        super().__init__(link)
        self._driver = driver
        self._opened = opened

    def __repr__(self) -> str:
        return f"CudaIpcLink({self._opened!r}, {self._link!r})"

    async def read_into(
        self, region: str, offset: int, into: memoryview, on_start: OnStart | None = None
    ) -> None:
        for start, part in writable_parts(into, MAX_READ_BYTES):
            await self._read(region, offset + start, part, on_start)

    async def _read(self, region: str, offset: int, into: memoryview, on_start: OnStart | None) -> None:
        async with self._link.export(self.transport, region, offset, len(into)) as reply:
            memory = decode_reply(self._link, CudaIpcMemory.decode, reply)
            if on_start is not None:
                on_start()
            if memory.offset + len(into) > memory.allocation_bytes:
                raise ProtocolError("a range of GPU memory ends outside its allocation")
            try:
                await run_in_thread(self._copy, memory, into)
            except DeviceError as error:
                raise NotShared(f"the peer's GPU memory cannot be read here: {error}") from error
        self._received_bytes += len(into)

    def _copy(self, memory: CudaIpcMemory, into: memoryview) -> None:
        with self._opened.opened(memory.handle) as base:
            self._driver.copy(address_of(into), base + memory.offset, len(into))


class CudaIpcTransport(ControlledTransport):
    """A Transport of a process that can use a GPU by `driver`."""

    name = "cuda_ipc"

    def __init__(
        self,
        secret: Secret,
        driver: IpcDriver,
        *,
        tls: ssl.SSLContext | None = None,
        settings: LinkSettings | None = None,
    ) -> None:
        super().__init__(secret, tls, settings)
        self._driver = driver
        self._opened = OpenedAllocations(driver)

    def __repr__(self) -> str:
        return f"CudaIpcTransport({self._opened!r})"

    @asynccontextmanager
    async def connect(self, peer: PeerAddress) -> AsyncIterator[Link]:
        async with self._control_on_host(peer) as link:
            yield CudaIpcLink(link, self._driver, self._opened)
