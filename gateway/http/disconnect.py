"""Cancellation of a request's work when its client disconnects, and the timer of a stream's keepalives."""

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from starlette.types import Receive

from gateway.http.limits import ClientGone

_WATCH_DELAY_S = 0.05

Tick = Callable[[], Awaitable[float]]


class CancelOnDisconnect:
    """A context whose body is cancelled when the client disconnects; it raises ClientGone then.

    Like asyncio.timeout it cancels the current task and takes its own cancellation back. The request's body
    must have been read. `tick`, where given, is called after `tick_in_s` and returns the seconds until its
    next call; if it raises, the body is cancelled and the error raised here.
    """

    def __init__(self, receive: Receive, *, tick: Tick | None = None, tick_in_s: float = 0.0) -> None:
        self._receive = receive
        self._tick = tick
        self._tick_in_s = tick_in_s
        self._task: asyncio.Task[object] | None = None
        self._delay: asyncio.TimerHandle | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._cancelling = 0
        self._fault: Exception | None = None
        self._disarmed = False

    def disarm(self) -> None:
        """Ignore a disconnect from now on: only the last message of the response is missing."""
        self._disarmed = True

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        # Most whole responses end before a client could leave, so the watcher starts late. A stream is
        # watched from its start, since each event that is not received is billed.
        delay_s = _WATCH_DELAY_S if self._tick is None else 0.0
        self._delay = self._task.get_loop().call_later(delay_s, self._start_watcher)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None and self._delay is not None
        self._delay.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
        if self._fault is None:
            return
        ours = self._task.uncancel() <= self._cancelling
        if ours and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise self._fault from error

    def _start_watcher(self) -> None:
        self._watcher = asyncio.create_task(self._watch(), name="watch client")

    async def _watch(self) -> None:
        try:
            await self._until_disconnect()
        except Exception as error:
            self._fault = error  # of a tick, raised to the body
        else:
            self._fault = ClientGone()
        if self._disarmed:
            self._fault = None
            return
        assert self._task is not None
        self._task.cancel()

    async def _until_disconnect(self) -> None:
        loop = asyncio.get_running_loop()
        when = loop.time() + self._tick_in_s if self._tick is not None else None
        while True:
            try:
                if when is None:
                    message = await self._receive()
                else:
                    async with asyncio.timeout_at(when):
                        message = await self._receive()
            except TimeoutError:
                assert self._tick is not None
                when = loop.time() + await self._tick()
                continue
            if message["type"] == "http.disconnect":
                return
