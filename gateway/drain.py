"""The gateway's life: serving, then draining on SIGTERM until what is in flight has ended."""

import asyncio
from enum import StrEnum

from gateway.errors import ApiError


class Phase(StrEnum):
    SERVING = "serving"  # takes requests
    DRAINING = "draining"  # finishes what it has, refuses what is new


class Gate:
    """Counts the requests in flight and lets no more in than allowed, and none while draining."""

    def __init__(self, max_in_flight: int) -> None:
        self.phase = Phase.SERVING
        self.in_flight = 0
        self._max_in_flight = max_in_flight
        self._idle = asyncio.Event()
        self._idle.set()

    def __repr__(self) -> str:
        return f"<Gate {self.phase} in_flight={self.in_flight}>"

    def enter(self) -> None:
        """Let a request in. Raises ApiError (503)."""
        if self.phase is Phase.DRAINING:
            raise ApiError(
                503,
                "draining",
                "this gateway is shutting down",
                retry_after_s=1,
                headers=(("connection", "close"),),
            )
        if self.in_flight >= self._max_in_flight:
            raise ApiError(
                503, "overloaded", f"{self.in_flight} requests are in flight already", retry_after_s=1
            )
        self.in_flight += 1
        self._idle.clear()

    def leave(self) -> None:
        self.in_flight -= 1
        if not self.in_flight:
            self._idle.set()

    def drain(self) -> None:
        self.phase = Phase.DRAINING

    async def wait_idle(self, limit_s: float) -> bool:
        """Wait until nothing is in flight, at most `limit_s`; says whether that came."""
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
