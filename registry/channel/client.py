"""The gateway's end of the channel: many calls over one authenticated connection.

A call sends one request and receives a stream of replies (see registry/messages/node.py). Calls do not wait
for each other: each has its own credit, so a caller that reads slowly holds up its own handler and no other.
A silent peer is considered dead, and every call ends with ChannelClosed.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Callable

import msgspec

from rdmacast.errors import CastError, LinkClosed
from rdmacast.protocol.connection import dial
from rdmacast.protocol.handshake import Secret
from registry.channel.connection import SERVICE, ChannelConnection, ChannelSettings
from registry.channel.frames import (
    FRAME_COST,
    INITIAL_CREDIT,
    MALFORMED,
    ChannelFrameKind,
    pack,
    pack_credit,
    unpack_failure,
)
from registry.channel.server import CallHandler, ChannelServer
from registry.errors import ChannelClosed, ChannelError, RemoteError
from registry.messages.node import Reply, Request

__all__ = ["CallHandler", "Channel", "ChannelCall", "ChannelServer", "ChannelSettings"]

_DATA, _LAST, _END, _ERROR = map(
    int, (ChannelFrameKind.DATA, ChannelFrameKind.LAST, ChannelFrameKind.END, ChannelFrameKind.ERROR)
)
_REPLIES = frozenset({_DATA, _LAST})
_FROM_SERVER = _REPLIES | {_END, _ERROR}
_encode = msgspec.msgpack.Encoder().encode
_CLOSE_S = 1.0  # for the last frames to be sent


class ChannelCall:
    """One call: `async with channel.call(request) as replies: async for reply in replies: …`.

    One task at a time may iterate. Raises RemoteError where the handler failed, ChannelClosed where the
    connection did. Leaving the block before the end cancels the handler at once.
    """

    __slots__ = ("_allowance", "_channel", "_consumed", "_end", "_id", "_replies", "_request", "_wakeup")

    def __init__(self, channel: "Channel", request: Request) -> None:
        self._channel = channel
        self._request = request
        self._id = 0
        self._replies: deque[tuple[Reply, int]] = deque()
        self._end: BaseException | None = None  # StopAsyncIteration after END
        self._wakeup: asyncio.Future[None] | None = None
        self._allowance = INITIAL_CREDIT  # what the server may still send
        self._consumed = 0  # read by the caller and not granted again yet

    def __repr__(self) -> str:
        state = "open" if self._end is None else f"ended: {self._end!r}"
        return f"Call({self._id} {type(self._request).__name__}, {len(self._replies)} waiting, {state})"

    async def __aenter__(self) -> "ChannelCall":
        channel = self._channel
        body = channel.encode(self._request)
        if channel.connection.reason is not None or channel.connection.is_congested:
            await channel.connection.writable()
        self._id = channel.open(self, body)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Cancel the handler, unless it has ended. Idempotent."""
        self._replies.clear()
        if self._end is None:
            self._channel.cancel(self._id)

    def __aiter__(self) -> "ChannelCall":
        return self

    async def __anext__(self) -> Reply:
        while (reply := self.take()) is None:
            if self._end is not None:
                raise self._end
            self._wakeup = self._channel.connection.loop.create_future()
            try:
                await self._wakeup
            finally:
                self._wakeup = None
        return reply

    def take(self) -> Reply | None:
        """Return the next reply if it has arrived."""
        if not self._replies:
            return None
        reply, cost = self._replies.popleft()
        self._consumed += cost
        if self._consumed >= INITIAL_CREDIT // 2 and self._end is None:
            self._channel.grant(self._id, self._consumed)
            self._allowance += self._consumed
            self._consumed = 0
        return reply

    # Called by the channel.

    def deliver(self, reply: Reply, nbytes: int) -> None:
        """Queue a reply. Raises ChannelError if the server exceeded its credit."""
        if self._allowance <= 0:
            raise ChannelError("the server exceeded its credit")
        cost = nbytes + FRAME_COST
        self._allowance -= cost
        self._replies.append((reply, cost))
        if self._wakeup is not None:
            self._wake()

    def finish(self, end: BaseException) -> None:
        """End the call; queued replies can still be read."""
        if self._end is None:
            self._end = end
            if self._wakeup is not None:
                self._wake()

    def _wake(self) -> None:
        assert self._wakeup is not None
        if not self._wakeup.done():
            self._wakeup.set_result(None)


class _ClientConnection(ChannelConnection):
    """The gateway's end of the connection: routes frames to their calls."""

    def __init__(self, settings: ChannelSettings, closed: Callable[[ChannelClosed], None]) -> None:
        super().__init__(settings)
        self._closed = closed
        self._decoder = msgspec.msgpack.Decoder(Reply)
        self.calls: dict[int, ChannelCall] = {}

    def frame_received(self, kind: int, call: int, body: memoryview) -> None:
        if kind not in _FROM_SERVER:
            raise ChannelError(f"a server sent {ChannelFrameKind(kind).name}")
        waiting = self.calls.get(call)
        if waiting is None:
            return  # its caller has left
        if kind in _REPLIES:
            try:
                reply = self._decoder.decode(body)
            except MALFORMED as error:
                raise ChannelError(f"a reply is malformed: {error}") from None
            waiting.deliver(reply, len(body))
            if kind == _DATA:
                return
        if kind == _ERROR:
            failure = unpack_failure(body)
            end: Exception = RemoteError(failure.code, failure.message)
        else:
            end = StopAsyncIteration()
        del self.calls[call]
        waiting.finish(end)

    def connection_closed(self, reason: ChannelClosed) -> None:
        calls, self.calls = self.calls, {}
        for call in calls.values():
            call.finish(ChannelClosed(str(reason)))
        self._closed(reason)


class Channel:
    """A connection to one node, created by `connect`. Stays closed once closed."""

    def __init__(
        self, settings: ChannelSettings, on_closed: Callable[["Channel", ChannelClosed], None] | None
    ) -> None:
        self._settings = settings
        self._on_closed = on_closed
        self._next_id = 1
        self.connection = _ClientConnection(settings, self._closed)

    def __repr__(self) -> str:
        return f"Channel({len(self.connection.calls)} calls, {self.connection!r})"

    @classmethod
    async def connect(
        cls,
        url: str,
        secret: Secret,
        *,
        tls: ssl.SSLContext | None = None,
        settings: ChannelSettings | None = None,
        on_closed: Callable[["Channel", ChannelClosed], None] | None = None,
    ) -> "Channel":
        """Dial `tcp://host:port` and authenticate. Raises ChannelClosed (no listener), ChannelError.

        `on_closed` is called once when the channel closes, with the reason.
        """
        channel = cls(settings or ChannelSettings(), on_closed)
        try:
            await dial(
                url,
                secret=secret,
                service=SERVICE,
                make_protocol=lambda: channel.connection,
                timeout_s=channel._settings.handshake_timeout_s,
                tls=tls,
            )
        except LinkClosed as error:
            raise ChannelClosed(str(error)) from error
        except CastError as error:
            raise ChannelError(str(error)) from error
        return channel

    @property
    def is_closed(self) -> bool:
        return self.connection.reason is not None

    def call(self, request: Request) -> ChannelCall:
        """Return a call to be entered with `async with`; entering raises ChannelClosed."""
        return ChannelCall(self, request)

    async def ask(self, request: Request) -> Reply:
        """Make a call and return its last reply. Raises RemoteError, ChannelClosed, ChannelError."""
        last: Reply | None = None
        async with self.call(request) as replies:
            async for reply in replies:
                last = reply
        if last is None:
            raise ChannelError(f"the reply to a {type(request).__name__} is empty")
        return last

    async def aclose(self) -> None:
        """Close; calls in progress end with ChannelClosed. Idempotent."""
        self.connection.shut(ChannelClosed("the channel was closed"), flush=True)
        await self.connection.wait_lost(_CLOSE_S)

    # Called by calls.

    def encode(self, request: Request) -> bytes:
        """Return the encoded request of a call. Raises ChannelError if it is too large."""
        body = _encode(request)
        if len(body) > self._settings.max_frame_bytes:
            raise ChannelError(
                f"a {type(request).__name__} of {len(body)} bytes exceeds the limit of "
                f"{self._settings.max_frame_bytes}"
            )
        return body

    def open(self, call: ChannelCall, body: bytes) -> int:
        """Send a call's request; return the call's id."""
        id_ = self._next_id
        self._next_id = id_ % 0xFFFFFFFF + 1
        self.connection.calls[id_] = call
        self.connection.write(pack(ChannelFrameKind.OPEN, id_, body))
        return id_

    def cancel(self, id_: int) -> None:
        if self.connection.calls.pop(id_, None) is not None:
            self.connection.write(pack(ChannelFrameKind.CANCEL, id_))

    def grant(self, id_: int, credit: int) -> None:
        self.connection.write(pack_credit(id_, credit))

    def _closed(self, reason: ChannelClosed) -> None:
        if self._on_closed is not None:
            self._on_closed(self, reason)
