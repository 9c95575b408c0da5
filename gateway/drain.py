"""The gateway's life: serving, then draining on SIGTERM until what is in flight has ended."""

import asyncio
from collections import Counter
from enum import StrEnum

from gateway.errors import ApiError

# A tenant may take this many times the places that it leaves free: 4 of 5 by itself, 4 of 9 beside another
# that takes as many, so that others always find some.
_SHARE_OF_FREE = 4


class Phase(StrEnum):
    SERVING = "serving"  # takes requests
    DRAINING = "draining"  # finishes what it has, refuses what is new


class Draining(ApiError):
    """What is new, and what outlasts the grace time, is told to come to another gateway."""

    def __init__(self) -> None:
        headers = (("connection", "close"),)
        super().__init__(503, "draining", "this gateway is shutting down", retry_after_s=1, headers=headers)


class Gate:
    """Counts the requests in flight and lets no more in than allowed, and none while draining.

    A request whose body has not come yet takes a place, but is not in flight: nothing was begun for
    it, so that a drain does not wait for it.
    """

    def __init__(self, max_in_flight: int) -> None:
        self.phase = Phase.SERVING
        self.in_flight = 0
        self.arriving = 0
        self._max_in_flight = max_in_flight
        self._tenants: Counter[str] = Counter()
        self._idle = asyncio.Event()
        self._idle.set()

    def __repr__(self) -> str:
        return f"<Gate {self.phase} in_flight={self.in_flight} arriving={self.arriving}>"

    def arrive(self) -> None:
        """Give a request a place while its body comes. Raises ApiError (503)."""
        self._check()
        self.arriving += 1

    def give_up(self) -> None:
        """The body did not come."""
        self.arriving -= 1

    def arrived(self) -> None:
        """The body is there: the request is in flight. Raises ApiError (503)."""
        self.arriving -= 1
        try:
            self.enter()
        except ApiError:
            self.arriving += 1
            raise

    def enter(self) -> None:
        """Let a request in. Raises ApiError (503)."""
        self._check()
        self.in_flight += 1
        self._idle.clear()

    def _check(self) -> None:
        if self.phase is Phase.DRAINING:
            raise Draining
        if (taken := self.in_flight + self.arriving) >= self._max_in_flight:
            raise ApiError(503, "overloaded", f"{taken} requests are in flight already", retry_after_s=1)

    def claim(self, tenant: str) -> None:
        """Put a place that was given to the account of who it is for. Raises ApiError (503) if that tenant
        has more of them than it may, given how few are left for others."""
        free = self._max_in_flight - self.in_flight - self.arriving
        if (own := self._tenants[tenant]) > _SHARE_OF_FREE * free:
            raise ApiError(
                503, "overloaded", f"{own} of your requests are in flight already", retry_after_s=1
            )
        self._tenants[tenant] += 1

    def release(self, tenant: str) -> None:
        """A place that was claimed is free."""
        self._tenants[tenant] -= 1
        if not self._tenants[tenant]:
            del self._tenants[tenant]

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
