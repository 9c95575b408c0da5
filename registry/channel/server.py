"""The node's end of the channel: runs a handler for each call and streams its replies."""

import asyncio
import logging
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextvars import ContextVar

import msgspec

from rdmacast.aio.eager import StartedCoroutine, start_eagerly
from rdmacast.protocol.connection import ConnectionListener, listen
from rdmacast.protocol.handshake import Secret
from registry.channel.connection import SERVICE, ChannelConnection, ChannelSettings
from registry.channel.frames import (
    FRAME_COST,
    INITIAL_CREDIT,
    MALFORMED,
    ChannelFrameKind,
    pack,
    pack_failure,
    unpack_credit,
)
from registry.errors import ChannelClosed, ChannelError, reason_of
from registry.messages.node import Reply, Request

logger = logging.getLogger(__name__)

CallHandler = Callable[[Request], AsyncIterator[Reply]]
TranslateError = Callable[[Exception], Exception]

_CLOSE_S = 1.0  # for the last frames to be sent

# The caller of the current handler: the peer that `on_peer_closed` names when its connection is lost.
caller: ContextVar[str] = ContextVar("caller", default="")


class _ServerCall:
    """A call in progress; `credit` is the number of bytes that the caller still accepts."""

    __slots__ = ("_granted", "credit", "task")

    task: asyncio.Task[None]

    def __init__(self) -> None:
        self.credit = INITIAL_CREDIT
        self._granted: asyncio.Future[None] | None = None

    def grant(self, credit: int) -> None:
        self.credit += credit
        if self._granted is not None and not self._granted.done() and self.credit > 0:
            self._granted.set_result(None)

    async def granted(self) -> None:
        """Return once there is credit."""
        while self.credit <= 0:
            self._granted = asyncio.get_running_loop().create_future()
            await self._granted


class _ServerConnection(ChannelConnection):
    """The connection of one peer. Its tasks are also held by the server, which outlives the connection."""

    def __init__(
        self,
        handler: CallHandler,
        translate: TranslateError,
        settings: ChannelSettings,
        tasks: set[asyncio.Task[None]],
        opened: Callable[["_ServerConnection"], None],
        closed: Callable[["_ServerConnection", ChannelClosed], None],
    ) -> None:
        super().__init__(settings)
        self._handler = handler
        self._translate = translate
        self._tasks = tasks
        self._opened = opened
        self._closed = closed
        self._calls: dict[int, _ServerCall] = {}
        self._decoder = msgspec.msgpack.Decoder(Request)
        self._encoder = msgspec.msgpack.Encoder()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._opened(self)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # Runs after the tasks of new calls, so that replies made without a wait leave in the same iteration.
        self.flush_soon()

    def connection_closed(self, reason: ChannelClosed) -> None:
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.task.cancel()
        self._closed(self, reason)

    def frame_received(self, kind: int, call: int, body: memoryview) -> None:
        if kind == ChannelFrameKind.OPEN:
            self._open(call, body)
        elif kind == ChannelFrameKind.CREDIT:
            if call in self._calls:
                self._calls[call].grant(unpack_credit(body))
        elif kind == ChannelFrameKind.CANCEL:
            cancelled = self._calls.pop(call, None)
            if cancelled is not None:
                cancelled.task.cancel()
        else:
            raise ChannelError(f"a client sent {ChannelFrameKind(kind).name}")

    def _open(self, id_: int, body: memoryview) -> None:
        if id_ in self._calls:
            raise ChannelError(f"call {id_} is open already")
        if len(self._calls) >= self._settings.max_calls:
            self.write(pack_failure(id_, "overloaded", f"more than {self._settings.max_calls} calls at once"))
            return
        try:
            request = self._decoder.decode(body)
        except MALFORMED as error:
            self.write(pack_failure(id_, "bad_request", f"the request is malformed: {error}"))
            return
        call = self._calls[id_] = _ServerCall()
        call.task = self.loop.create_task(self._serve(id_, call, request))

    async def _serve(self, id_: int, call: _ServerCall, request: Request) -> None:
        replies: AsyncIterator[Reply] | None = None
        self._tasks.add(call.task)
        caller.set(self._peer)
        try:
            replies = self._handler(request)
            await self._pass_on(id_, call, replies)
        except asyncio.CancelledError:
            # A call ended by its caller or the connection has left the table: the handler cancelled itself.
            if self._calls.get(id_) is call:
                logger.error("the handler of a %s cancelled itself", type(request).__name__)
                self.write(pack_failure(id_, "internal", "the handler was cancelled"))
            raise
        except ChannelClosed as error:
            if self.reason is None:  # of another channel, which the handler used
                self.write(pack_failure(id_, *_describe(self._translate(error), request)))
        except Exception as error:  # any: reported to the caller
            self.write(pack_failure(id_, *_describe(self._translate(error), request)))
        finally:
            # After a CANCEL the id may belong to another call by now.
            if self._calls.get(id_) is call:
                del self._calls[id_]
            try:
                if isinstance(replies, AsyncGenerator):
                    await replies.aclose()
            finally:
                self._tasks.discard(call.task)

    async def _pass_on(self, id_: int, call: _ServerCall, replies: AsyncIterator[Reply]) -> None:
        """Send each reply at once; one after which the handler ends without a wait goes out with the end."""
        held: bytes | None = None
        try:
            while True:
                started = start_eagerly(replies.__anext__())
                if isinstance(started, StartedCoroutine):
                    if held is not None:
                        self.write(pack(ChannelFrameKind.DATA, id_, held))
                        held = None
                    reply = await started
                else:
                    reply = started
                    if held is not None:
                        self.write(pack(ChannelFrameKind.DATA, id_, held))
                        held = None
                body = self._encoder.encode(reply)
                if call.credit <= 0:
                    await call.granted()
                if self.is_congested:
                    await self.writable()
                call.credit -= len(body) + FRAME_COST
                held = body
        except StopAsyncIteration:
            self.write(
                pack(ChannelFrameKind.END, id_) if held is None else pack(ChannelFrameKind.LAST, id_, held)
            )
            held = None
        finally:
            if held is not None and self._calls.get(id_) is call:
                self.write(pack(ChannelFrameKind.DATA, id_, held))  # the handler failed after it


class ChannelServer:
    """Listens for gateways; `start` it or use it as a context manager.

    `handler(request)` yields the replies. An exception with a `code` attribute (a string) ends the call with
    that code and its text, any other with `internal`; both sides of a cancelled call end at once, and the
    handler sees CancelledError. `translate` returns the exception that an exception is reported as.
    `on_peer_closed` is called for each lost connection.
    """

    def __init__(
        self,
        listen: str,
        secret: Secret,
        handler: CallHandler,
        *,
        tls: ssl.SSLContext | None = None,
        settings: ChannelSettings | None = None,
        translate: TranslateError = lambda error: error,
        on_peer_closed: Callable[[str, ChannelClosed], None] | None = None,
    ) -> None:
        self._listen_url = listen
        self._secret = secret
        self._handler = handler
        self._tls = tls
        self._settings = settings or ChannelSettings()
        self._translate = translate
        self._on_peer_closed = on_peer_closed
        self._listener: ConnectionListener | None = None
        self._connections: set[_ServerConnection] = set()
        self._tasks: set[asyncio.Task[None]] = set()  # those that have begun

    def __repr__(self) -> str:
        where = self._listener.endpoint.url if self._listener else "not listening"
        return f"ChannelServer({where}, {len(self._connections)} peers, {len(self._tasks)} calls)"

    async def __aenter__(self) -> "ChannelServer":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Listen. Raises OSError."""
        self._listener = await listen(
            self._listen_url,
            secret=self._secret,
            service=SERVICE,
            make_protocol=self._make_connection,
            timeout_s=self._settings.handshake_timeout_s,
            tls=self._tls,
        )

    @property
    def url(self) -> str:
        """The listening address, with the port that the system chose."""
        if self._listener is None:
            raise RuntimeError("the channel server has not started")
        return self._listener.endpoint.url

    @property
    def peers(self) -> tuple[str, ...]:
        """The connected peers, as `host:port`."""
        return tuple(connection.peer for connection in self._connections)

    async def aclose(self) -> None:
        """Stop listening, close every connection, and return when every handler has ended. Idempotent."""
        if self._listener is not None:
            self._listener.close()
        connections = tuple(self._connections)
        for connection in connections:
            connection.shut(ChannelClosed("the server closed"), flush=True)
        for connection in connections:
            await connection.wait_lost(_CLOSE_S)
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _make_connection(self) -> _ServerConnection:
        return _ServerConnection(
            self._handler,
            self._translate,
            self._settings,
            self._tasks,
            self._connections.add,
            self._forget,
        )

    def _forget(self, connection: _ServerConnection, reason: ChannelClosed) -> None:
        self._connections.discard(connection)
        logger.info("channel with %s: closed: %s", connection.peer, reason)
        if self._on_peer_closed is not None:
            self._on_peer_closed(connection.peer, reason)


def _describe(error: Exception, request: Request) -> tuple[str, str]:
    """Return the code and text of a handler's failure, for the caller."""
    code = getattr(error, "code", None)
    if isinstance(code, str) and code:
        return code, reason_of(error)
    logger.error("the handler of a %s failed", type(request).__name__, exc_info=error)
    return "internal", str(error) or type(error).__name__
