"""An asynchronous condition with callbacks: waiters are woken by notifications, never by polling."""

import asyncio
from collections.abc import Callable


class ChangeCondition:
    """A condition on which `notify` runs the callbacks in order of subscription, then wakes every waiter."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], None]] = []
        self._waiters: set[asyncio.Future[None]] = set()
        self._scheduled = False
        self._timer: asyncio.TimerHandle | None = None

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Call `callback` at each `notify`."""
        self._callbacks.append(callback)

    def notify(self) -> None:
        """Run the callbacks and wake all waiters."""
        for callback in self._callbacks:
            callback()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def notify_soon(self) -> None:
        """Notify once after this iteration of the event loop, however often this is called."""
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._notify_now)

    def _notify_now(self) -> None:
        self._scheduled = False
        self.notify()

    def notify_within(self, delay_s: float) -> None:
        """Notify within `delay_s`, once for all calls until then."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
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
        """Return once `predicate` holds; it is evaluated now and after each `notify`."""
        while not predicate():
            await self.wait()
