"""Dials and authenticates links between stages; all functions block."""

import socket
import ssl
import time
from dataclasses import dataclass

from invoker.links.framing import FrameFormat, FrameReader, LinkFrame, LinkLost, MessageT, new_buffer
from rdmacast.address import parse_url
from rdmacast.errors import CastError
from rdmacast.protocol.handshake import ClientHandshake, Handshake, Secret, ServerHandshake, Service
from rdmacast.protocol.priority import make_urgent

SERVICE = Service("stages", 1)
CONNECT_TIMEOUT_S = 10.0  # to connect and authenticate
_KEEP_IDLE_S, _KEEP_EVERY_S, _KEEP_TIMES = 2, 2, 3
_MAX_KEY_BYTES = 1024
_PIECE_BYTES = 1 << 20  # per call, so that the deadline is checked
_ACCEPTED, _REFUSED = b"\1", b"\0"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageKey:
    """The stage that a link leads to; with a `sequence`, the K and V that the stage exported of it.

    An instance that hands a sequence off is a stage whose `pipeline` is the instance's id.
    """

    pipeline: str
    epoch: int
    place: int
    sequence: str = ""

    def __str__(self) -> str:
        return f"stage {self.place} of pipeline {self.pipeline}.{self.epoch}"


KEY_FRAMES: FrameFormat[StageKey] = FrameFormat(b"HCL1", (StageKey,), max_message_bytes=_MAX_KEY_BYTES)


def local_name(url: str) -> str:
    """Return the name of the abstract Unix socket that nodes of the same host use instead of `url`."""
    return f"\0hypercast-stages/{url}"


def dial(
    url: str,
    key: StageKey,
    secret: Secret,
    *,
    same_host: bool,
    tls: ssl.SSLContext | None,
    reply_s: float = CONNECT_TIMEOUT_S,
) -> socket.socket:
    """Connect to a stage, by Unix socket if both nodes share a host. Raises LinkLost."""
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    made = _connect(url, deadline, same_host, tls)
    try:
        _handshake(made, ClientHandshake(secret, SERVICE), deadline)
        _send(made, KEY_FRAMES.encode(key), deadline)
        if _receive(made, 1, time.monotonic() + reply_s) != _ACCEPTED:
            raise LinkLost(f"{url} expects no link to {key}")
        _prioritize(made, key)
    except (OSError, CastError) as error:
        made.close()
        raise LinkLost(f"cannot connect to stage at {url}: {error}") from error
    except BaseException:
        made.close()
        raise
    return made


def admit(
    accepted: socket.socket, secret: Secret, tls: ssl.SSLContext | None
) -> tuple[socket.socket, StageKey]:
    """Authenticate a peer and return its socket (wrapped if TLS is on) and the stage it asks for.

    Raises LinkLost; the caller closes the accepted socket.
    """
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    try:
        if accepted.family != socket.AF_UNIX:
            _set_options(accepted)
            if tls is not None:
                accepted.settimeout(CONNECT_TIMEOUT_S)
                accepted = tls.wrap_socket(accepted, server_side=True)
        _handshake(accepted, ServerHandshake(secret, SERVICE), deadline)
        key = receive_frame(accepted, FrameReader(KEY_FRAMES, _no_payload), deadline).message
        _prioritize(accepted, key)
        return accepted, key
    except (OSError, CastError) as error:
        accepted.close()
        raise LinkLost(str(error)) from error
    except BaseException:
        accepted.close()
        raise


def reply(admitted: socket.socket, *, accepted: bool) -> None:
    """Report to the peer whether its link is accepted. Raises OSError."""
    admitted.settimeout(CONNECT_TIMEOUT_S)
    admitted.sendall(_ACCEPTED if accepted else _REFUSED)


def receive_frame(link: socket.socket, reader: FrameReader[MessageT], deadline: float) -> LinkFrame[MessageT]:
    """Receive one frame from a blocking socket. Raises LinkLost, OSError."""
    frame = None
    while frame is None:
        link.settimeout(seconds_left(deadline))
        count = link.recv_into(reader.buffer()[:_PIECE_BYTES])
        if not count:
            raise LinkLost("the peer closed the connection")
        frame = reader.advance(count)
    return frame


def _no_payload(_: StageKey, payload_bytes: int) -> memoryview:
    return new_buffer(payload_bytes, 0)


def _connect(url: str, deadline: float, same_host: bool, tls: ssl.SSLContext | None) -> socket.socket:
    if same_host:
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        local.settimeout(seconds_left(deadline))
        try:
            local.connect(local_name(url))
        except OSError:
            local.close()  # the peer is in another network namespace
        else:
            return local
    try:
        endpoint = parse_url(url)
        made = socket.create_connection((endpoint.host, endpoint.port), seconds_left(deadline))
    except (OSError, ValueError, UnicodeError) as error:
        raise LinkLost(f"cannot connect to {url}: {error}") from error
    try:
        _set_options(made)
        return made if tls is None else tls.wrap_socket(made)
    except OSError as error:
        made.close()
        raise LinkLost(f"cannot connect to {url}: {error}") from error


def _prioritize(one: socket.socket, key: StageKey) -> None:
    """Mark links for hidden states as urgent: steps wait for them.

    K and V are not: they are long, and go before weights anyway.
    """
    if not key.sequence:
        make_urgent(one)


def _set_options(one: socket.socket) -> None:
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEP_IDLE_S)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEP_EVERY_S)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEP_TIMES)


def _handshake(one: socket.socket, handshake: Handshake, deadline: float) -> None:
    if handshake.opening:
        _send(one, handshake.opening, deadline)
    while needed := handshake.needed:
        try:
            message = _receive(one, needed, deadline)
        except EOFError:
            raise handshake.on_peer_closed() from None
        _send(one, handshake.receive(message), deadline)


def _send(one: socket.socket, data: bytes | memoryview, deadline: float) -> None:
    one.settimeout(seconds_left(deadline))
    one.sendall(data)


def _receive(one: socket.socket, count: int, deadline: float) -> bytes:
    """Receive exactly `count` bytes. Raises EOFError if the peer closed the connection, OSError."""
    got = b""
    while len(got) < count:
        one.settimeout(seconds_left(deadline))
        part = one.recv(count - len(got))
        if not part:
            raise _PeerClosed
        got += part
    return got


class _PeerClosed(EOFError, OSError):
    """The peer closed the connection."""

    def __str__(self) -> str:
        return "the peer closed the connection"


def seconds_left(deadline: float) -> float:
    """Return the time until `deadline`, of the monotonic clock. Raises TimeoutError if it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left
