"""This process's end of reads by NIXL: the agent that others read from, and those that read."""

import asyncio
import logging
import mmap
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from rdmacast.errors import DeviceError, NotShared
from rdmacast.nixl_agent import NixlDriver
from rdmacast.nixl_memory import NONCE_BYTES, Meeting, ShownMemory
from rdmacast.nixl_native import NativeDriver
from rdmacast.nixl_reader import AgentMemory, NixlReader
from rdmacast.verbs_reads import POLL_S
from rdmacast.waiting import run_in_thread

logger = logging.getLogger(__name__)

_IDLE_READERS = 4


class NixlNode:
    """One for all links of a process. All methods belong to the event loop's thread."""

    def __init__(self, driver: NixlDriver) -> None:
        """Raises DeviceError."""
        self._driver = driver
        self._agent = driver.agent()
        self.memory = AgentMemory(self._agent)
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._page = mmap.mmap(-1, mmap.PAGESIZE)
        self._page[:NONCE_BYTES] = self._nonce
        self._stack = ExitStack()
        self._shown = 0
        self._timer: asyncio.TimerHandle | None = None
        self._idle: list[NixlReader] = []
        self._closed = False
        try:
            self._probe = self._stack.enter_context(self.memory.shown(memoryview(self._page)))
        except DeviceError:
            self._agent.close()
            raise

    def __repr__(self) -> str:
        return f"NixlNode({self._shown} shown, {len(self._idle)} idle readers, {self.memory!r})"

    def __enter__(self) -> "NixlNode":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def meeting(self) -> Iterator[Meeting]:
        """Inside, a peer may read the test."""
        with self._serving():
            yield Meeting(self._probe, self._nonce)

    @contextmanager
    def showing(self, view: memoryview) -> Iterator[ShownMemory]:
        """Inside, a peer may read the view. Raises NotShared."""
        try:
            with self.memory.shown(view) as shown, self._serving():
                yield shown
        except DeviceError as error:
            raise NotShared(f"that memory is not for NIXL: {error}") from error

    async def reader(self) -> NixlReader:
        """An agent to read one peer with; the caller closes it. Raises DeviceError."""
        if self._idle:
            return self._idle.pop()
        agent = await run_in_thread(None, self._driver.agent)
        return NixlReader(agent, self._give_back)

    def close(self) -> None:
        """All links have been closed before. Idempotent."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for reader in self._idle:
            reader.destroy()
        self._idle.clear()
        self._stack.close()
        self.memory.registered.close()
        self._agent.close()

    def _give_back(self, reader: NixlReader) -> None:
        if self._closed or len(self._idle) >= _IDLE_READERS:
            reader.destroy()
        else:
            self._idle.append(reader)

    @contextmanager
    def _serving(self) -> Iterator[None]:
        """Inside, the agent makes progress."""
        self._shown += 1
        if self._timer is None:
            self._progress()
        try:
            yield
        finally:
            self._shown -= 1

    def _progress(self) -> None:
        self._timer = None
        try:
            self._agent.progress()
        except DeviceError as error:
            logger.warning("NIXL: %s", error)
        if self._shown:
            self._timer = asyncio.get_running_loop().call_later(POLL_S, self._progress)


def open_nixl() -> NixlNode:
    """Raises NoTransport or DeviceError, which say what is missing."""
    return NixlNode(NativeDriver())
