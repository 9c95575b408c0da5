"""Cancellation of a request's work when its client disconnects, and the timer of a stream's keepalives."""

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from starlette.types import Scope

from gateway.http.limits import ClientGone

CONNECTION_END = "hypercast.connection_end"  # in the ASGI scope

Tick = Callable[[], Awaitable[float]]


class ConnectionEnd:
    """The end of a client's connection: its callbacks run when the connection is lost."""

    __slots__ = ("_lost", "callbacks", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.callbacks: set[Callable[[], None]] = set()
        self._lost = False

    def __repr__(self) -> str:
        return f"<ConnectionEnd {'lost' if self._lost else 'open'} callbacks={len(self.callbacks)}>"

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the connection is lost, at once if it is."""
        if self._lost:
            callback()
        else:
            self.callbacks.add(callback)

    def set_lost(self) -> None:
        """Run the callbacks, once."""
        self._lost = True
        while self.callbacks:
            self.callbacks.pop()()


class CancelOnDisconnect:
    """A context whose body is cancelled when the client disconnects; it raises ClientGone then.

    Like asyncio.timeout it cancels the current task and takes its own cancellation back. `tick`, where given,
    is called after `tick_in_s` and returns the seconds until its next call; if it raises, the body is
    cancelled and the error raised here.
    """

    def __init__(self, scope: Scope, *, tick: Tick | None = None, tick_in_s: float = 0.0) -> None:
        self._end: ConnectionEnd = scope[CONNECTION_END]
        self._tick = tick
        self._tick_in_s = tick_in_s
        self._task: asyncio.Task[object] | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._cancelling = 0
        self._fault: Exception | None = None
        self._disarmed = False

    def disarm(self) -> None:
        """Ignore a disconnect from now on: only the last message of the response is missing."""
        self._disarmed = True

    def __enter__(self) -> Self:
        self._task = asyncio.current_task(self._end.loop)
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        self._end.subscribe(self._on_lost)
        if self._tick is not None:
            self._ticker = asyncio.create_task(self._run_ticks(self._tick), name="stream keepalive")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.callbacks.discard(self._on_lost)
        if self._ticker is not None:
            self._ticker.cancel()
        if self._fault is None:
            return
        assert self._task is not None
        ours = self._task.uncancel() <= self._cancelling
        if ours and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise self._fault from error

    def _on_lost(self) -> None:
        self._cancel(ClientGone())

    async def _run_ticks(self, tick: Tick) -> None:
        delay_s = self._tick_in_s
        try:
            while True:
                await asyncio.sleep(delay_s)
                delay_s = await tick()
        except Exception as error:  # whatever the tick raises ends the body, which raises it
            self._cancel(error)

    def _cancel(self, fault: Exception) -> None:
        """Cancel the body, once, unless only the last message is missing."""
        if not self._disarmed and self._fault is None:
            assert self._task is not None
            self._fault = fault
            self._task.cancel()
