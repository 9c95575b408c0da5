"""The log as tests hear it: each line when it is written."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self


class Listener(logging.Handler):
    """Keeps what is logged, by any thread; make it within the event loop that waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._said: list[str] = []
        self._grown = asyncio.Event()

    @classmethod
    @contextmanager
    def on(cls, name: str = "") -> Iterator[Self]:
        """Hear a logger and those below it."""
        logger, listener = logging.getLogger(name), cls()
        logger.addHandler(listener)
        try:
            yield listener
        finally:
            logger.removeHandler(listener)

    def emit(self, record: logging.LogRecord) -> None:
        self._loop.call_soon_threadsafe(self._hear, record.getMessage())

    async def hear(self, text: str) -> None:
        """Return once this was said."""
        while not any(text in line for line in self._said):
            self._grown.clear()
            await self._grown.wait()

    def _hear(self, line: str) -> None:
        self._said.append(line)
        self._grown.set()
