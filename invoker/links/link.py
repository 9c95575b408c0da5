"""Making a link between two stages: who may, over what, and for which stage. All of it blocks."""

import socket
import ssl
import struct
import time
from dataclasses import dataclass

import msgspec

from invoker.stages.frames import LinkLost
from rdmacast.address import parse_url
from rdmacast.errors import CastError
from rdmacast.handshake import ClientHandshake, Handshake, ServerHandshake, Service
from registry.urgent import make_urgent

SERVICE = Service("stages", 1)
MAKE_S = 10.0  # to connect and to show that one knows the secret
_KEEP_IDLE_S, _KEEP_EVERY_S, _KEEP_TIMES = 2, 2, 3
_MAX_KEY_BYTES = 1024
_LENGTH = struct.Struct("<H")
_TAKEN, _UNKNOWN = b"\1", b"\0"
_MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageKey:
    """Which stage of which pipeline a link leads to; with a `sequence` it is for what the stage put aside of
    its K and V."""

    pipeline: str
    epoch: int
    place: int
    sequence: str = ""

    def __str__(self) -> str:
        return f"stage {self.place} of pipeline {self.pipeline}.{self.epoch}"


_encode = msgspec.msgpack.Encoder().encode
_keys = msgspec.msgpack.Decoder(StageKey)


def local_name(url: str) -> str:
    """The Unix socket (of Linux's abstract names) beside a TCP one, for nodes of the same host."""
    return f"\0hypercast-stages/{url}"


def dial(
    url: str,
    key: StageKey,
    secret: bytes,
    *,
    same_host: bool,
    tls: ssl.SSLContext | None,
    answer_s: float = MAKE_S,
) -> socket.socket:
    """A link to that stage, by Unix socket where both are on one host. Raises LinkLost."""
    deadline = time.monotonic() + MAKE_S
    made = _connect(url, deadline, same_host, tls)
    try:
        _shake(made, ClientHandshake(secret, SERVICE), deadline)
        said = _encode(key)
        _send(made, _LENGTH.pack(len(said)) + said, deadline)
        if _receive(made, 1, time.monotonic() + answer_s) != _TAKEN:
            raise LinkLost(f"{url} has no use for a link to {key}")
        _prefer(made, key)
    except (OSError, CastError) as error:
        made.close()
        raise LinkLost(f"no link to {url}: {error}") from error
    except BaseException:
        made.close()
        raise
    return made


def admit(
    accepted: socket.socket, secret: bytes, tls: ssl.SSLContext | None
) -> tuple[socket.socket, StageKey]:
    """What a peer that has connected wants, once it has shown that it knows the secret; the socket may be
    another from here on. Raises LinkLost; the caller closes what it accepted."""
    deadline = time.monotonic() + MAKE_S
    try:
        if accepted.family != socket.AF_UNIX:
            _tune(accepted)
            if tls is not None:
                accepted.settimeout(MAKE_S)
                accepted = tls.wrap_socket(accepted, server_side=True)
        _shake(accepted, ServerHandshake(secret, SERVICE), deadline)
        (length,) = _LENGTH.unpack(_receive(accepted, _LENGTH.size, deadline))
        if length > _MAX_KEY_BYTES:
            raise LinkLost(f"a name of {length} bytes")
        key = _keys.decode(_receive(accepted, length, deadline))
        _prefer(accepted, key)
        return accepted, key
    except (OSError, CastError) as error:
        accepted.close()
        raise LinkLost(str(error)) from error
    except _MALFORMED as error:
        accepted.close()
        raise LinkLost(f"a peer asked for no stage: {error}") from None
    except BaseException:
        accepted.close()
        raise


def answer(admitted: socket.socket, *, taken: bool) -> None:
    """Say whether the stage waits for this link. Raises OSError."""
    admitted.settimeout(MAKE_S)
    admitted.sendall(_TAKEN if taken else _UNKNOWN)


def _connect(url: str, deadline: float, same_host: bool, tls: ssl.SSLContext | None) -> socket.socket:
    if same_host:
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        local.settimeout(_left(deadline))
        try:
            local.connect(local_name(url))
        except OSError:
            local.close()  # of the same host, but not in the same network namespace
        else:
            return local
    try:
        endpoint = parse_url(url)
        made = socket.create_connection((endpoint.host, endpoint.port), _left(deadline))
    except (OSError, ValueError, UnicodeError) as error:
        raise LinkLost(f"cannot connect to {url}: {error}") from error
    try:
        _tune(made)
        return made if tls is None else tls.wrap_socket(made)
    except OSError as error:
        made.close()
        raise LinkLost(f"cannot connect to {url}: {error}") from error


def _prefer(one: socket.socket, key: StageKey) -> None:
    """Hidden states are short, and steps wait for them; the keys and values of a sequence are neither."""
    if not key.sequence:
        make_urgent(one)


def _tune(one: socket.socket) -> None:
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEP_IDLE_S)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEP_EVERY_S)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEP_TIMES)


def _shake(one: socket.socket, handshake: Handshake, deadline: float) -> None:
    if handshake.opening:
        _send(one, handshake.opening, deadline)
    while needed := handshake.needed:
        try:
            message = _receive(one, needed, deadline)
        except EOFError:
            raise handshake.hung_up() from None
        _send(one, handshake.receive(message), deadline)


def _send(one: socket.socket, data: bytes, deadline: float) -> None:
    one.settimeout(_left(deadline))
    one.sendall(data)


def _receive(one: socket.socket, count: int, deadline: float) -> bytes:
    """Exactly so many bytes. Raises EOFError at the end, OSError."""
    got = b""
    while len(got) < count:
        one.settimeout(_left(deadline))
        part = one.recv(count - len(got))
        if not part:
            raise _Ended
        got += part
    return got


class _Ended(EOFError, OSError):
    """The peer closed the connection."""

    def __str__(self) -> str:
        return "the peer closed the connection"


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"nothing within {MAKE_S:g} s")
    return left
