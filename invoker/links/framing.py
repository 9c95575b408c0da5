"""The framing of links between nodes: stages, prefill pairs and KV transfers (pure).

A frame is a header of 20 bytes (magic, kind, lengths; little-endian), a message (MessagePack) and an optional
payload of raw bytes. Sizes are bounded, and a payload's size is checked before memory is allocated for it.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from invoker.engine.contract import EngineError

HEADER_BYTES = 20
_BUFFER_BYTES = 64 << 10  # initially; grows to the largest message

_HEADER = struct.Struct("<4sBxxxIQ")
_MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_encode = msgspec.msgpack.Encoder().encode

MessageT = TypeVar("MessageT")


class LinkLost(EngineError):
    """The link to another node was lost, or received data is not a valid frame."""

    code = "pipeline_lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFrame(Generic[MessageT]):
    """A received message with its payload, in the buffer that the receiver provided."""

    message: MessageT
    payload: memoryview


class FrameFormat(Generic[MessageT]):
    """The frames of one kind of link: magic, message types and the maximum size of a message.

    A message's kind in the header is the index of its type, from 1.
    """

    def __init__(self, magic: bytes, types: tuple[type[Any], ...], *, max_message_bytes: int) -> None:
        self._magic = magic
        self._kinds = {one: kind for kind, one in enumerate(types, 1)}
        self._decoders = [msgspec.msgpack.Decoder(one).decode for one in types]
        self._max_message_bytes = max_message_bytes

    def __repr__(self) -> str:
        return f"<FrameFormat {self._magic!r}>"

    def encode(self, message: MessageT, payload_bytes: int = 0) -> memoryview:
        """Return all of a frame but its payload."""
        encoded = _encode(message)
        kind = self._kinds[type(message)]
        return memoryview(_HEADER.pack(self._magic, kind, len(encoded), payload_bytes) + encoded)

    def parse_header(self, data: memoryview, offset: int) -> tuple[int, int, int]:
        """Return kind, message bytes and payload bytes. Raises LinkLost."""
        magic, kind, message_bytes, payload_bytes = _HEADER.unpack_from(data, offset)
        if magic != self._magic or not 1 <= kind <= len(self._decoders):
            raise LinkLost(f"received data is not a frame of format {self._magic.decode()}")
        if not 0 < message_bytes <= self._max_message_bytes:
            raise LinkLost(f"a message of {message_bytes} bytes, maximum {self._max_message_bytes}")
        return kind, message_bytes, payload_bytes

    def decode(self, kind: int, encoded: memoryview) -> MessageT:
        """Decode a message. Raises LinkLost."""
        try:
            message: MessageT = self._decoders[kind - 1](encoded)
        except _MALFORMED as error:
            raise LinkLost(f"malformed frame: {error}") from None
        return message


class FrameReader(Generic[MessageT]):
    """Assembles frames from received bytes: read into `buffer()`, then pass their number to `advance`.

    `payload_buffer(message, payload_bytes)` validates a message and returns the buffer for its payload, or
    raises LinkLost. With `read_ahead` a small frame takes one read, which may return following bytes as well:
    the beginning of its payload is copied. Without it each part is read directly into its place.
    """

    def __init__(
        self,
        frames: FrameFormat[MessageT],
        payload_buffer: Callable[[MessageT, int], memoryview],
        *,
        read_ahead: bool = False,
    ) -> None:
        self._frames = frames
        self._payload_buffer = payload_buffer
        self._read_ahead = read_ahead
        self._received = memoryview(bytearray(_BUFFER_BYTES))
        self._start, self._end = 0, 0  # of received bytes that are not part of a returned frame
        self._needed = HEADER_BYTES  # bytes before the payload, as far as known
        self._message: MessageT | None = None
        self._payload = self._received[:0]  # of `_message`, received up to `_filled`
        self._filled = 0

    def __repr__(self) -> str:
        return f"<FrameReader {self._end - self._start + self._filled} bytes of a frame>"

    def buffer(self) -> memoryview:
        """Return where to write the next bytes; never empty."""
        if self._message is not None:
            return self._payload[self._filled :]
        return self._received[self._end : None if self._read_ahead else self._start + self._needed]

    def advance(self, count: int) -> LinkFrame[MessageT] | None:
        """Return the next complete frame, if any, after `count` more bytes. Raises LinkLost.

        With 0, return another frame from bytes read ahead.
        """
        if self._message is not None:
            self._filled += count
        else:
            self._end += count
            self._message = self._read_message()
        message, payload = self._message, self._payload
        if message is None or self._filled < len(payload):
            return None
        self._message, self._filled = None, 0
        return LinkFrame(message=message, payload=payload)

    def _read_message(self) -> MessageT | None:
        """Decode the next message if it is complete, and prepare its payload's buffer."""
        available = self._end - self._start
        if available < self._needed:
            self._reserve()
            return None
        kind, message_bytes, payload_bytes = self._frames.parse_header(self._received, self._start)
        self._needed = HEADER_BYTES + message_bytes
        if available < self._needed:
            self._reserve()
            return None
        start, self._needed = self._start + HEADER_BYTES, HEADER_BYTES
        message = self._frames.decode(kind, self._received[start : start + message_bytes])
        self._payload = self._payload_buffer(message, payload_bytes)
        self._start = start + message_bytes
        self._take_payload()
        return message

    def _take_payload(self) -> None:
        """Copy the beginning of the payload if it was read ahead."""
        self._filled = min(len(self._payload), self._end - self._start)
        if self._filled:
            self._payload[: self._filled] = self._received[self._start : self._start + self._filled]
        self._start += self._filled
        if self._start == self._end:
            self._start = self._end = 0

    def _reserve(self) -> None:
        """Make room for `_needed` bytes of the current frame."""
        if not self._start and len(self._received) >= self._needed:
            return
        rest = bytes(self._received[self._start : self._end])
        if len(self._received) < self._needed:
            self._received = memoryview(bytearray(self._needed))
        self._received[: len(rest)] = rest
        self._start, self._end = 0, len(rest)


def new_buffer(payload_bytes: int, expected_bytes: int) -> memoryview:
    """Return a buffer for a payload of the expected size. Raises LinkLost for another size."""
    if payload_bytes != expected_bytes:
        raise LinkLost(f"a payload of {payload_bytes} bytes, expected {expected_bytes}")
    return memoryview(bytearray(expected_bytes))
