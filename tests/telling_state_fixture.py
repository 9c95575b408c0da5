"""A shared state that keeps what it is told of live serving."""

import asyncio
from collections.abc import Callable

from registry.live import LiveRecord
from registry.memory_state import MemoryState
from tests.patience import PATIENCE_S


class TellingState(MemoryState):
    """Keeps what it was told, and takes it once `gate` is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked = asyncio.Event()
        self.told: list[LiveRecord] = []
        self._news = asyncio.Event()

    async def put_live(self, record: LiveRecord, ttl_s: float) -> None:
        self.asked.set()
        await self.gate.wait()
        self.told.append(record)
        await super().put_live(record, ttl_s)
        self._news.set()

    def times(self, function: str) -> int:
        """How often it was told of a function."""
        return sum(record.function == function for record in self.told)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Return once what it was told is so."""
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                self._news.clear()
                await self._news.wait()

    async def renewed(self, function: str) -> None:
        """Return once it was told again of the function, whose only pipeline is put and does not change: then
        all that is told or forgotten from time to time has been."""
        known = self.times(function)
        await self.until(lambda: self.times(function) > known + 1)
