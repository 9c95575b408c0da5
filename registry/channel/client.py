"""The gateway-invoker channel: many calls over one authenticated connection.

A call sends one request and receives a stream of replies (see registry/messages.py). Calls do not
wait for each other: each has credit of its own, so a caller that reads slowly holds up its own
handler and nobody else. A peer that falls silent is given up, and every call ends with ChannelClosed.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from types import TracebackType

import msgspec

from rdmacast.connection import dial
from rdmacast.errors import CastError, LinkClosed
from registry.channel_connection import SERVICE, ChannelConnection, ChannelSettings
from registry.channel_frames import (
    FRAME_COST,
    INITIAL_CREDIT,
    MALFORMED,
    Kind,
    pack,
    pack_credit,
    unpack_failure,
)
from registry.channel_server import ChannelServer, Handler
from registry.errors import ChannelClosed, ChannelError, RemoteError
from registry.messages import Reply, Request

__all__ = ["Call", "Channel", "ChannelServer", "ChannelSettings", "Handler"]

_DATA, _LAST, _END, _ERROR = map(int, (Kind.DATA, Kind.LAST, Kind.END, Kind.ERROR))
_REPLIES = frozenset({_DATA, _LAST})
_FROM_SERVER = _REPLIES | {_END, _ERROR}
_encode = msgspec.msgpack.Encoder().encode
_CLOSE_S = 1.0  # for the last frames to go out


class Call:
    """One call: `async with channel.call(request) as replies: async for reply in replies: …`.

    One task at a time may iterate. Raises RemoteError where the handler failed, ChannelClosed where
    the connection did. Leaving the block before the end cancels the handler at once.
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
        self._consumed = 0  # taken by the caller and not yet granted anew

    def __repr__(self) -> str:
        state = "open" if self._end is None else f"ended: {self._end!r}"
        return f"Call({self._id} {type(self._request).__name__}, {len(self._replies)} waiting, {state})"

    async def __aenter__(self) -> "Call":
        channel = self._channel
        body = channel.encode(self._request)
        if not channel.is_writable:
            await channel.writable()
        self._id = channel.open(self, body)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._replies.clear()
        self._channel.leave(self._id)

    def __aiter__(self) -> "Call":
        return self

    async def __anext__(self) -> Reply:
        while not self._replies:
            if self._end is not None:
                raise self._end
            self._wakeup = asyncio.get_running_loop().create_future()
            try:
                await self._wakeup
            finally:
                self._wakeup = None
        reply, cost = self._replies.popleft()
        self._consumed += cost
        if self._consumed >= INITIAL_CREDIT // 2 and self._end is None:
            self._channel.grant(self._id, self._consumed)
            self._allowance += self._consumed
            self._consumed = 0
        return reply

    # What the channel calls.

    def deliver(self, reply: Reply, nbytes: int) -> None:
        """Raises ChannelError if the server sent beyond its credit."""
        if self._allowance <= 0:
            raise ChannelError("the server sent beyond its credit")
        cost = nbytes + FRAME_COST
        self._allowance -= cost
        self._replies.append((reply, cost))
        self._wake()

    def finish(self, end: BaseException) -> None:
        """No reply comes any more; those that came can still be taken."""
        if self._end is None:
            self._end = end
            self._wake()

    def _wake(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)


class _ClientConnection(ChannelConnection):
    """The gateway's end of the wire: sorts frames to their calls."""

    def __init__(self, settings: ChannelSettings, closed: Callable[[ChannelClosed], None]) -> None:
        super().__init__(settings)
        self._closed = closed
        self._decoder = msgspec.msgpack.Decoder(Reply)
        self.calls: dict[int, Call] = {}

    def frame_received(self, kind: int, call: int, body: memoryview) -> None:
        if kind not in _FROM_SERVER:
            raise ChannelError(f"{Kind(kind).name} came from a server")
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
    """A connection to one node; make it with `connect`. Stays closed once closed."""

    def __init__(
        self, settings: ChannelSettings, on_closed: Callable[["Channel", ChannelClosed], None] | None
    ) -> None:
        self._settings = settings
        self._on_closed = on_closed
        self._next_id = 1
        self._connection = _ClientConnection(settings, self._closed)

    def __repr__(self) -> str:
        return f"Channel({len(self._connection.calls)} calls, {self._connection!r})"

    @classmethod
    async def connect(
        cls,
        url: str,
        secret: bytes,
        *,
        tls: ssl.SSLContext | None = None,
        settings: ChannelSettings | None = None,
        on_closed: Callable[["Channel", ChannelClosed], None] | None = None,
    ) -> "Channel":
        """Dial `tcp://host:port` and authenticate. Raises ChannelClosed (nobody there), ChannelError.

        `on_closed` hears once that the channel is closed, and why.
        """
        channel = cls(settings or ChannelSettings(), on_closed)
        try:
            await dial(
                url,
                secret=secret,
                service=SERVICE,
                make_protocol=lambda: channel._connection,
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
        return self._connection.reason is not None

    def call(self, request: Request) -> Call:
        """A call to be entered with `async with`; entering raises ChannelClosed."""
        return Call(self, request)

    async def ask(self, request: Request) -> Reply:
        """Make a call and return its last reply. Raises RemoteError, ChannelClosed, ChannelError."""
        last: Reply | None = None
        async with self.call(request) as replies:
            async for reply in replies:
                last = reply
        if last is None:
            raise ChannelError(f"a {type(request).__name__} was answered by nothing")
        return last

    async def aclose(self) -> None:
        """Close; calls under way end with ChannelClosed. Idempotent."""
        self._connection.shut(ChannelClosed("the channel was closed"), flush=True)
        await self._connection.wait_lost(_CLOSE_S)

    # What calls use.

    def encode(self, request: Request) -> bytes:
        """A call's request as it is sent. Raises ChannelError if it is too large."""
        body = _encode(request)
        if len(body) > self._settings.max_frame_bytes:
            raise ChannelError(
                f"a {type(request).__name__} of {len(body)} bytes is over the bound of "
                f"{self._settings.max_frame_bytes}"
            )
        return body

    @property
    def is_writable(self) -> bool:
        """Whether `writable` would neither wait nor raise."""
        return self._connection.reason is None and not self._connection.is_congested

    async def writable(self) -> None:
        """Return once the server takes more. Raises ChannelClosed."""
        await self._connection.writable()

    def open(self, call: Call, body: bytes) -> int:
        """Send a call's request; returns its id."""
        id_ = self._next_id
        self._next_id = id_ % 0xFFFFFFFF + 1
        self._connection.calls[id_] = call
        self._connection.write(pack(Kind.OPEN, id_, body))
        return id_

    def leave(self, id_: int) -> None:
        if self._connection.calls.pop(id_, None) is not None:
            self._connection.write(pack(Kind.CANCEL, id_))

    def grant(self, id_: int, credit: int) -> None:
        self._connection.write(pack_credit(id_, credit))

    def _closed(self, reason: ChannelClosed) -> None:
        if self._on_closed is not None:
            self._on_closed(self, reason)
