"""The channel's frames, and their bounds (pure).

A frame is a header of 9 bytes (body length, kind, call; big-endian), then its body. Only the side that
dialled opens calls. On each call the server may send bodies up to its *credit*; the caller grants more as it
consumes them. The last body may exceed the credit, so that any size fits.

| frame | from | body |
|---|---|---|
| OPEN | client | the request; it grants the initial credit |
| DATA | server | a reply |
| LAST | server | a reply, the call's last: as DATA and END |
| END | server | |
| ERROR | server | code and message |
| CANCEL | client | |
| CREDIT | client | further credit, 4 bytes |
| PING, PONG | both | (call is 0) |
"""

import struct
from collections.abc import Iterator
from enum import IntEnum

import msgspec

from registry.errors import ChannelError

HEADER_BYTES = 9
INITIAL_CREDIT = 256 * 1024
FRAME_COST = 64  # added to the length of a body, so that empty ones are bounded too
MAX_ERROR_BYTES = 16 * 1024

_HEADER = struct.Struct(">IBI")
_CREDIT = struct.Struct(">I")


class ChannelFrameKind(IntEnum):
    """The kind of a frame."""

    OPEN = 1
    DATA = 2
    END = 3
    ERROR = 4
    CANCEL = 5
    CREDIT = 6
    PING = 7
    PONG = 8
    LAST = 9


_FIXED_BODIES: dict[int, int] = {
    ChannelFrameKind.END: 0,
    ChannelFrameKind.CANCEL: 0,
    ChannelFrameKind.CREDIT: _CREDIT.size,
    ChannelFrameKind.PING: 0,
    ChannelFrameKind.PONG: 0,
}
_KINDS = frozenset(map(int, ChannelFrameKind))
_REPLIES = frozenset(map(int, (ChannelFrameKind.DATA, ChannelFrameKind.LAST)))  # of any length

# The exceptions of msgspec for a malformed body: invalid UTF-8 and endless nesting have their own.
MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class Failure(msgspec.Struct, frozen=True):
    """The body of an ERROR frame."""

    code: str
    message: str


_failure_encoder = msgspec.msgpack.Encoder()
_failure_decoder = msgspec.msgpack.Decoder(Failure)


def pack(kind: ChannelFrameKind, call: int, body: bytes = b"") -> bytes:
    return _HEADER.pack(len(body), kind, call) + body


def pack_credit(call: int, credit: int) -> bytes:
    return pack(ChannelFrameKind.CREDIT, call, _CREDIT.pack(credit))


def unpack_credit(body: memoryview) -> int:
    (credit,) = _CREDIT.unpack(body)
    return int(credit)


def pack_failure(call: int, code: str, message: str) -> bytes:
    # Lone surrogates (from file names) have no UTF-8 and are replaced.
    text = message[: MAX_ERROR_BYTES // 8].encode(errors="replace").decode()
    failure = Failure(code[:64], text)
    return pack(ChannelFrameKind.ERROR, call, _failure_encoder.encode(failure))


def unpack_failure(body: memoryview) -> Failure:
    """Decode the body of an ERROR frame. Raises ChannelError."""
    try:
        return _failure_decoder.decode(body)
    except MALFORMED as error:
        raise ChannelError(f"an ERROR frame is malformed: {error}") from None


class FrameSplitter:
    """Splits bytes into frames, without copying bodies that arrive whole."""

    def __init__(self, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self._rest = bytearray()
        self._wanted = HEADER_BYTES

    def __repr__(self) -> str:
        return f"FrameSplitter({len(self._rest)} of {self._wanted} bytes)"

    def split(self, data: bytes) -> Iterator[tuple[int, int, memoryview]]:
        """Yield (kind, call, body) of each complete frame; a body is valid until the next one.

        Raises ChannelError where a frame exceeds a bound.
        """
        source: bytes | bytearray = data
        if self._rest:
            self._rest += data
            if len(self._rest) < self._wanted:
                return
            source, self._rest = self._rest, bytearray()
        view = memoryview(source)
        start, end = 0, len(source)
        self._wanted = HEADER_BYTES
        while end - start >= HEADER_BYTES:
            length, kind, call = _HEADER.unpack_from(source, start)
            if kind not in _REPLIES or length > self._max_body_bytes:
                self._check(length, kind)
            stop = start + HEADER_BYTES + length
            if stop > end:
                self._wanted = HEADER_BYTES + length
                break
            yield kind, call, view[start + HEADER_BYTES : stop]
            start = stop
        if start < end:
            self._rest += view[start:]

    def _check(self, length: int, kind: int) -> None:
        if kind not in _KINDS:
            raise ChannelError(f"unknown frame kind {kind}")
        if length > self._max_body_bytes:
            raise ChannelError(f"a frame of {length} bytes exceeds the limit of {self._max_body_bytes}")
        fixed = _FIXED_BODIES.get(kind)
        if fixed is not None and length != fixed:
            raise ChannelError(f"a {ChannelFrameKind(kind).name} frame cannot carry {length} bytes")
        if kind == ChannelFrameKind.ERROR and length > MAX_ERROR_BYTES:
            raise ChannelError(f"an ERROR frame of {length} bytes exceeds the limit of {MAX_ERROR_BYTES}")
