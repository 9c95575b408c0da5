"""This process's NIXL agents: the one that serves reads, and those that read."""

import asyncio
import logging
import mmap
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from rdmacast.aio.threads import run_in_thread
from rdmacast.errors import DeviceError, NotShared
from rdmacast.transports.nixl.agent import NixlDriver
from rdmacast.transports.nixl.memory import NONCE_BYTES, NixlMemory, NixlProbe
from rdmacast.transports.nixl.native import NativeDriver
from rdmacast.transports.nixl.reader import AgentMemory, NixlReader
from rdmacast.transports.verbs.reads import POLL_S

logger = logging.getLogger(__name__)

_IDLE_READERS = 4


class NixlNode:
    """The agents of one process. All methods belong to the event loop's thread."""

    def __init__(self, driver: NixlDriver) -> None:
        """Make the serving agent. Raises DeviceError."""
        self._driver = driver
        self._agent = driver.agent()
        self.memory = AgentMemory(self._agent)
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._page = mmap.mmap(-1, mmap.PAGESIZE)
        self._page[:NONCE_BYTES] = self._nonce
        self._stack = ExitStack()
        self._shares = 0
        self._timer: asyncio.TimerHandle | None = None
        self._idle: list[NixlReader] = []
        self._closed = False
        try:
            self._probe = self._stack.enter_context(self.memory.shared(memoryview(self._page)))
        except DeviceError:
            self._agent.close()
            raise

    def __repr__(self) -> str:
        return f"NixlNode({self._shares} shared, {len(self._idle)} idle readers, {self.memory!r})"

    def __enter__(self) -> "NixlNode":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def probe(self) -> Iterator[NixlProbe]:
        """Serve the test read inside."""
        with self._serving():
            yield NixlProbe(self._probe, self._nonce)

    @contextmanager
    def shared(self, view: memoryview) -> Iterator[NixlMemory]:
        """Serve reads of the view inside. Raises NotShared."""
        try:
            with self.memory.shared(view) as shared, self._serving():
                yield shared
        except DeviceError as error:
            raise NotShared(f"that memory is not for NIXL: {error}") from error

    async def reader(self) -> NixlReader:
        """Return an agent to read one peer with, which the caller closes. Raises DeviceError."""
        if self._idle:
            return self._idle.pop()
        agent = await run_in_thread(self._driver.agent)
        return NixlReader(agent, self._release)

    def close(self) -> None:
        """Close all agents; the links must have been closed before. Idempotent."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for reader in self._idle:
            reader.destroy()
        self._idle.clear()
        self._stack.close()
        self.memory.registered.close()
        self._agent.close()

    def _release(self, reader: NixlReader) -> None:
        if self._closed or len(self._idle) >= _IDLE_READERS:
            reader.destroy()
        else:
            self._idle.append(reader)

    @contextmanager
    def _serving(self) -> Iterator[None]:
        """Poll the serving agent inside."""
        self._shares += 1
        if self._timer is None:
            self._progress()
        try:
            yield
        finally:
            self._shares -= 1

    def _progress(self) -> None:
        self._timer = None
        try:
            self._agent.progress()
        except DeviceError as error:
            logger.warning("NIXL: %s", error)
        if self._shares:
            self._timer = asyncio.get_running_loop().call_later(POLL_S, self._progress)


def open_nixl() -> NixlNode:
    """Open the agents by the package `nixl`. Raises NoTransport or DeviceError, with what is missing."""
    return NixlNode(NativeDriver())
