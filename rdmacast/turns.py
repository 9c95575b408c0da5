"""Whose payload leaves a node's port next: one at a time, so that each arrives as early as it can."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from heapq import heappop, heappush

_SAMPLES = 16  # the latest turns, which tell what the port can do
_LONG = 2.0  # a turn that takes more than so many times that long lets the next begin
_LEAST_S = 0.05
_FIRST_BYTES_S = 8e6  # what a port is taken for while nothing is known of it


class Turns:
    """Several payloads that share a port end all late, those that wait for their turn one by one; but one
    that its receiver takes slowly leaves the port free for the next. The lowest rank comes first, of equals
    who asked first."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap
        self._asked = 0
        self._holder: object | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ended: deque[tuple[float, int]] = deque(maxlen=_SAMPLES)  # seconds, bytes

    def __repr__(self) -> str:
        return f"Turns({'taken' if self._holder is not None else 'free'}, {len(self._waiting)} waiting)"

    @asynccontextmanager
    async def turn(self, nbytes: int, rank: int = 0) -> AsyncIterator[None]:
        """Inside, the port is ours, or whoever had it takes too long."""
        loop = asyncio.get_running_loop()
        if self._holder is not None:
            granted: asyncio.Future[None] = loop.create_future()
            self._asked += 1
            heappush(self._waiting, (rank, self._asked, granted))
            try:
                await granted
            except asyncio.CancelledError:
                if not granted.cancelled():  # it was granted meanwhile
                    self._next()
                raise
        mine = self._holder = object()
        long_s = self._long_s(nbytes)
        self._timer = loop.call_later(long_s, self._next)
        began_s = loop.time()
        try:
            yield
        finally:
            self._ended.append((min(long_s, loop.time() - began_s), nbytes))
            if self._holder is mine:
                self._next()

    def _long_s(self, nbytes: int) -> float:
        """After so long the next may begin."""
        # Short ones tell little: buffers on the way take them at once.
        like = [(seconds, moved) for seconds, moved in self._ended if 2 * moved >= nbytes]
        if not like:
            return _LONG * nbytes / _FIRST_BYTES_S
        pace_s = sum(seconds for seconds, _ in like) / sum(moved for _, moved in like)
        return max(_LEAST_S, _LONG * pace_s * nbytes)

    def _next(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._holder = None
        while self._waiting:
            granted = heappop(self._waiting)[2]
            if not granted.done():  # else who waited has left
                self._holder = granted
                granted.set_result(None)
                return
