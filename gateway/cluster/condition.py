"""A change that several tasks wait for: callbacks at once, coroutines by predicate. Never polls."""

import asyncio
from collections.abc import Callable


class Wakeup:
    """`notify` runs the callbacks in order of subscription, then wakes every waiter."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], None]] = []
        self._waiters: set[asyncio.Future[None]] = set()
        self._soon = False
        self._timer: asyncio.TimerHandle | None = None

    def subscribe(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def notify(self) -> None:
        for callback in self._callbacks:
            callback()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def notify_soon(self) -> None:
        """Notify once this turn of the event loop is over, however often it was asked for."""
        if not self._soon:
            self._soon = True
            asyncio.get_running_loop().call_soon(self._notify_now)

    def _notify_now(self) -> None:
        self._soon = False
        self.notify()

    def notify_within(self, delay_s: float) -> None:
        """Notify after `delay_s` at the latest, once for all who ask until then."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._timer_rang)

    def _timer_rang(self) -> None:
        self._timer = None
        self.notify()

    async def wait(self) -> None:
        """Return at the next `notify`."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    async def wait_for(self, predicate: Callable[[], bool]) -> None:
        """Return once `predicate` holds; it is asked now and after each `notify`."""
        while not predicate():
            await self.wait()
