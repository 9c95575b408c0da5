"""A client that leaves cancels what is done for it; a quiet stream gets its keepalives."""

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from starlette.types import Receive

from gateway.limits import ClientGone

_BEGIN_S = 0.05

Tick = Callable[[], Awaitable[float]]


class Attended:
    """Cancels its body when the client disconnects, which the body's caller sees as ClientGone.

    Works as asyncio.timeout does: it cancels the current task and takes its own cancellation back.
    The request's body must have been read. `tick`, where given, is called when its time has come and
    returns in how many seconds to call it again; if it fails, the body is cancelled and the failure raised.
    """

    def __init__(self, receive: Receive, *, tick: Tick | None = None, tick_in_s: float = 0.0) -> None:
        self._receive = receive
        self._tick = tick
        self._tick_in_s = tick_in_s
        self._task: asyncio.Task[object] | None = None
        self._beginning: asyncio.TimerHandle | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._cancelling = 0
        self._fault: Exception | None = None
        self._finished = False

    def finish(self) -> None:
        """The response is complete but for its last message: a disconnect changes nothing any more."""
        self._finished = True

    async def __aenter__(self) -> Self:
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        # Most whole answers are over before anybody could have left: they need no watcher. A stream is
        # watched from its begin, for each event that nobody receives is billed.
        delay_s = _BEGIN_S if self._tick is None else 0.0
        self._beginning = self._task.get_loop().call_later(delay_s, self._begin)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None and self._beginning is not None
        self._beginning.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
        if self._fault is None:
            return
        ours = self._task.uncancel() <= self._cancelling
        if ours and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise self._fault from error

    def _begin(self) -> None:
        self._watcher = asyncio.create_task(self._watch(), name="attend client")

    async def _watch(self) -> None:
        try:
            await self._until_gone()
        except Exception as error:
            self._fault = error  # of a tick: what it could not do, the body cannot do either
        else:
            self._fault = ClientGone()
        if self._finished:
            self._fault = None
            return
        assert self._task is not None
        self._task.cancel()

    async def _until_gone(self) -> None:
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
