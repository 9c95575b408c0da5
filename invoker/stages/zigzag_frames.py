"""What source and target of a pair say to each other (pure; see zigzag_source.py).

A frame is a header of 16 bytes (magic, lengths; little-endian), one of the structs here (MessagePack), and
the bytes that belong to it, as they lie in memory:

| struct | from | bytes |
|---|---|---|
| Offer | source | the ids of its tokens, int64 |
| Drop, Take | source | |
| Given | target | hidden states of all tokens behind the layers run, then K and V of each of these layers |
"""

import struct
from dataclasses import dataclass
from typing import Annotated

import msgspec

from invoker.stages.frames import LinkLost

HEADER_BYTES = 16
MAX_SAID_BYTES = 1 << 20
MAX_TOKENS = 16_384  # of a prompt that is offered
_ID_BYTES = 8
_MAGIC = b"HCZ1"
_HEADER = struct.Struct("<4sIQ")
_MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

_Name = Annotated[str, msgspec.Meta(max_length=128)]
_Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class _Said(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One of the structs of a frame."""


class Offer(_Said, frozen=True):
    """A prompt, for the call of that id, that waits behind those offered before."""

    name: _Name
    call: _Name
    tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]


class Drop(_Said, frozen=True):
    """Nobody wants this prompt any more."""

    name: _Name


class Take(_Said, frozen=True):
    """The source is free: give the first of the prompts away."""


class Given(_Said, frozen=True):
    """A prompt that is the source's from here on, of which `layers` layers have been run; "" is none."""

    name: _Name
    layers: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
    hidden_bytes: _Bytes
    kv_bytes: _Bytes


Said = Offer | Drop | Take | Given


@dataclass(frozen=True, slots=True, kw_only=True)
class PairFrame:
    """What came; `data` is the frame's own."""

    said: Said
    data: memoryview


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Said).decode


def pack(said: Said) -> memoryview:
    """All of a frame but the bytes that belong to it."""
    encoded = _encode(said)
    return memoryview(_HEADER.pack(_MAGIC, len(encoded), data_bytes(said)) + encoded)


def data_bytes(said: Said) -> int:
    """How many bytes belong to it."""
    if isinstance(said, Offer):
        return said.tokens * _ID_BYTES
    return said.hidden_bytes + said.kv_bytes if isinstance(said, Given) else 0


class PairReader:
    """Puts frames together, as FrameReader does, but keeps nothing of them: all K and V of a prompt may be in
    one."""

    def __init__(self) -> None:
        self._head = bytearray(HEADER_BYTES)
        self._said: Said | None = None
        self._part = memoryview(self._head)  # what is being filled, from `_filled` on
        self._filled = 0
        self._in_head = True

    def __repr__(self) -> str:
        return f"<PairReader {self._filled} of {len(self._part)} bytes>"

    def buffer(self) -> memoryview:
        """Where the next bytes belong; never empty."""
        return self._part[self._filled :]

    def advance(self, count: int) -> PairFrame | None:
        """So many bytes have come. Raises LinkLost for what is no frame."""
        self._filled += count
        if self._filled < len(self._part):
            return None
        if self._in_head:
            magic, said_bytes, _ = _HEADER.unpack(self._head)
            if magic != _MAGIC or not 0 < said_bytes <= MAX_SAID_BYTES:
                raise LinkLost("what came is no frame of a pair")
            self._in_head = False
            self._next(memoryview(bytearray(said_bytes)))
            return None
        if self._said is None:
            self._said = self._read_said()
            self._next(memoryview(bytearray(data_bytes(self._said))))
            if len(self._part):
                return None
        frame = PairFrame(said=self._said, data=self._part)
        self._said, self._in_head = None, True
        self._next(memoryview(self._head))
        return frame

    def _read_said(self) -> Said:
        try:
            said = _decode(self._part)
        except _MALFORMED as error:
            raise LinkLost(f"a frame of a pair is malformed: {error}") from None
        _, _, told = _HEADER.unpack(self._head)
        if told != data_bytes(said):
            raise LinkLost(f"{told} bytes came with {type(said).__name__} for {data_bytes(said)}")
        return said

    def _next(self, part: memoryview) -> None:
        self._part, self._filled = part, 0
