"""A real Redis for tests, on a Unix socket in a folder of theirs.

with running_redis(tmp_path) as server:          # outside of an event loop
    asyncio.run(something(server.url))

async with RedisServer(tmp_path) as server:      # inside of one
    ...
    await server.kill()                          # kill -9
    await server.start()                         # again, on the same files
"""

import asyncio
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from registry.embedded_redis import EmbeddedRedis
from tests.patience import PATIENCE_S


class RedisServer:
    """An embedded Redis as a child process of the test."""

    def __init__(self, folder: Path) -> None:
        self.embedded = EmbeddedRedis(folder / "state")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return self.embedded.url

    async def start(self) -> None:
        """Start it and return when it answers."""
        self._spawn()
        try:
            await self.embedded.wait_ready(PATIENCE_S)
        except BaseException:
            self._end(signal.SIGKILL)
            raise

    async def kill(self) -> None:
        """End it as a crash would; what reached the operating system stays."""
        self._end(signal.SIGKILL)

    async def stop(self) -> None:
        """End it in order, if it runs."""
        self._end(signal.SIGTERM)

    def pause(self) -> None:
        """Stop it from answering, connections left open, until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    def _spawn(self) -> None:
        assert self._process is None
        self.embedded.prepare()
        self._process = subprocess.Popen(self.embedded.command())

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(PATIENCE_S)
            self._process = None


@contextmanager
def running_redis(folder: Path) -> Iterator[RedisServer]:
    """A running Redis for the length of a `with`."""
    server = RedisServer(folder)
    asyncio.run(server.start())
    try:
        yield server
    finally:
        asyncio.run(server.stop())
