"""Authenticated TCP connections: dial or listen, authenticate, then pass the transport to a protocol."""

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar, cast

from rdmacast.address import TcpAddress, parse_url
from rdmacast.aio.closing import abort, close_soon
from rdmacast.errors import CastError, LinkClosed, PeerAuthError, ProtocolError
from rdmacast.protocol.handshake import ClientHandshake, Handshake, Secret, ServerHandshake, Service

logger = logging.getLogger(__name__)

MAX_HANDSHAKES = 256  # connections that have not authenticated yet

P = TypeVar("P", bound=asyncio.BaseProtocol)


class _Handshaking(asyncio.Protocol):
    """One handshake; `on_begin` is called at its start, `on_end` at its end with the error or None.

    A connection that is secured first (`secure`) has one timeout for both, which starts with TLS.
    """

    def __init__(
        self,
        handshake: Handshake,
        make_next: Callable[[], asyncio.BaseProtocol],
        timeout_s: float,
        on_begin: Callable[["_Handshaking"], None],
        on_end: Callable[["_Handshaking", CastError | None], None],
    ) -> None:
        self._handshake = handshake
        self._make_next = make_next
        self._on_end = on_end
        self._timeout_s = timeout_s
        self._received = bytearray()
        self._over = False
        self._on_begin = on_begin
        self._socket: socket.socket | None = None  # while it is being secured
        self._securing: asyncio.Task[None] | None = None
        self._peername: tuple[str, int] | None = None
        self._transport: asyncio.Transport
        self._timer: asyncio.TimerHandle | None = None

    @property
    def peer(self) -> str:
        host, port = (self._peername or ("an unknown address", 0))[:2]
        return f"{host}:{port}"

    def secure(self, accepted: socket.socket, tls: ssl.SSLContext) -> None:
        """Start TLS on an accepted connection, whose socket this owns from now on."""
        self._socket = accepted
        with suppress(OSError):  # a closed connection has no address
            self._peername = accepted.getpeername()
        self._securing = asyncio.get_running_loop().create_task(self._secure(accepted, tls), name="tls")
        self._start()

    async def _secure(self, accepted: socket.socket, tls: ssl.SSLContext) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self, accepted, ssl=tls, ssl_handshake_timeout=self._timeout_s
            )
        except OSError as error:
            self.abort(LinkClosed(f"no TLS: {getattr(error, 'reason', None) or error}"))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._socket = None
        if self._over:
            self._transport.abort()
            return
        self._peername = transport.get_extra_info("peername")
        _tune(transport)
        if self._timer is None:
            self._start()
        self._transport.write(self._handshake.opening)

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        late = LinkClosed(f"no handshake within {self._timeout_s:g} s")
        self._timer = loop.call_later(self._timeout_s, self.abort, late)
        self._on_begin(self)

    def data_received(self, data: bytes) -> None:
        if self._over:
            return
        self._received += data
        try:
            while 0 < (needed := self._handshake.needed) <= len(self._received):
                message = bytes(self._received[:needed])
                del self._received[:needed]
                self._transport.write(self._handshake.receive(message))
        except CastError as error:
            self.abort(error)
            return
        if not self._handshake.needed:
            self._hand_over()

    def connection_lost(self, exc: Exception | None) -> None:
        self.abort(self._handshake.on_peer_closed())

    def abort(self, error: CastError) -> None:
        """End the handshake with `error`; does nothing if it has ended."""
        if self._over:
            return
        self._end(error)
        if self._socket is not None:
            with suppress(OSError):  # the event loop closes it, now that TLS cannot go on
                self._socket.shutdown(socket.SHUT_RDWR)
        else:
            # What was written is still sent: a client of another version reads ours from it.
            close_soon(self._transport)

    def _end(self, error: CastError | None) -> None:
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
        self._on_end(self, error)

    def _hand_over(self) -> None:
        successor = self._make_next()
        # Paused, so that no event loop has a read under way with the old protocol's buffers.
        self._transport.pause_reading()
        self._transport.set_protocol(successor)
        self._transport.resume_reading()
        successor.connection_made(self._transport)
        self._end(None)
        if self._received:
            _feed(successor, bytes(self._received))


class _Accepted(asyncio.Protocol):
    """A protocol that takes over an accepted connection before anything is read from it.

    A handshake then starts TLS: a server that has TLS itself reports a connection only after it.
    """

    def __init__(self, handshaking: _Handshaking, tls: ssl.SSLContext) -> None:
        self._handshaking = handshaking
        self._tls = tls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        accepted = transport.get_extra_info("socket")
        try:
            taken = socket.socket(fileno=os.dup(accepted.fileno()))
        except OSError as error:
            logger.warning("a connection could not be taken: %s", error)
        else:
            self._handshaking.secure(taken, self._tls)
        cast(asyncio.Transport, transport).abort()


def _feed(protocol: asyncio.BaseProtocol, data: bytes) -> None:
    """Pass bytes that arrived with the end of the handshake to the protocol."""
    if isinstance(protocol, asyncio.BufferedProtocol):
        rest = memoryview(data)
        while rest:
            buffer = memoryview(protocol.get_buffer(len(rest)))
            taken = min(len(buffer), len(rest))
            buffer[:taken] = rest[:taken]
            protocol.buffer_updated(taken)
            rest = rest[taken:]
    else:
        cast(asyncio.Protocol, protocol).data_received(data)


def _tune(transport: asyncio.BaseTransport) -> None:
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


async def dial(
    url: str,
    *,
    secret: Secret,
    service: Service,
    make_protocol: Callable[[], P],
    timeout_s: float,
    tls: ssl.SSLContext | None = None,
) -> P:
    """Connect and authenticate; the protocol's `connection_made` has run when this returns.

    Raises PeerAuthError, ProtocolError or LinkClosed. Cancellation closes the connection.
    """
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    done.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # there may be no waiter
    made: list[P] = []

    def make_next() -> P:
        made.append(make_protocol())
        return made[0]

    def on_end(_: _Handshaking, error: CastError | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    client = ClientHandshake(secret, service)
    handshaking = _Handshaking(client, make_next, timeout_s, lambda _: None, on_end)
    transport = await _connect(url, handshaking, timeout_s, tls)
    try:
        await done
    except CastError as error:
        abort(transport)
        if isinstance(error, PeerAuthError):
            logger.warning("%s: cannot authenticate with %s: %s", service.name, url, error)
        raise type(error)(f"{url}: {error}") from error
    except asyncio.CancelledError:
        abort(transport)
        raise
    return made[0]


async def _connect(
    url: str, handshaking: _Handshaking, timeout_s: float, tls: ssl.SSLContext | None
) -> asyncio.WriteTransport:
    """Open the connection that the handshake uses. Raises LinkClosed."""
    try:
        endpoint = parse_url(url)
    except ValueError as error:  # the address came from a peer
        raise LinkClosed(f"cannot connect: {error}") from error
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_s):
            transport, _ = await loop.create_connection(
                lambda: handshaking, endpoint.host, endpoint.port, ssl=tls
            )
    except TimeoutError as error:
        raise LinkClosed(f"cannot connect to {url} within {timeout_s:g} s") from error
    except OSError as error:
        raise LinkClosed(f"cannot connect to {url}: {error.strerror or error}") from error
    except UnicodeError as error:  # not a valid host name
        raise LinkClosed(f"cannot connect to {url}: {error}") from error
    return transport


class ConnectionListener:
    """A listening socket whose connections are authenticated before a protocol gets them."""

    def __init__(self, server: asyncio.Server, handshaking: dict[_Handshaking, None]) -> None:
        self._server = server
        self._handshaking = handshaking
        self._endpoint = TcpAddress(*server.sockets[0].getsockname()[:2])

    def __repr__(self) -> str:
        return f"ConnectionListener({self._endpoint.url}, {len(self._handshaking)} in handshake)"

    @property
    def endpoint(self) -> TcpAddress:
        return self._endpoint

    def close(self) -> None:
        """Stop listening and abort pending handshakes; established connections belong to their owner."""
        self._server.close()
        for handshaking in tuple(self._handshaking):
            handshaking.abort(LinkClosed("the listener closed"))


async def listen(
    url: str,
    *,
    secret: Secret,
    service: Service,
    make_protocol: Callable[[], asyncio.BaseProtocol],
    timeout_s: float,
    tls: ssl.SSLContext | None = None,
) -> ConnectionListener:
    """Listen on `url`; each authenticated connection gets its own protocol. Raises OSError."""
    endpoint = parse_url(url)
    handshaking: dict[_Handshaking, None] = {}  # oldest first

    def on_end(finished: _Handshaking, error: CastError | None) -> None:
        handshaking.pop(finished, None)
        if error is not None:
            # Any client may connect and send nothing; another secret is for the operator to fix.
            level = logging.WARNING if isinstance(error, PeerAuthError) else logging.INFO
            logger.log(level, "%s: refused a connection from %s: %s", service.name, finished.peer, error)

    def on_begin(accepted: _Handshaking) -> None:
        if len(handshaking) >= MAX_HANDSHAKES:
            oldest = next(iter(handshaking))
            oldest.abort(ProtocolError("too many connections that have not authenticated"))
        handshaking[accepted] = None

    def accept() -> asyncio.Protocol:
        accepted = _Handshaking(ServerHandshake(secret, service), make_protocol, timeout_s, on_begin, on_end)
        return accepted if tls is None else _Accepted(accepted, tls)

    loop = asyncio.get_running_loop()
    server = await loop.create_server(accept, endpoint.host, endpoint.port, backlog=512)
    return ConnectionListener(server, handshaking)
