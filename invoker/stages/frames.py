"""The frames between stages, and their bounds (pure).

A frame is a header of 20 bytes (magic, kind, lengths; little-endian), what it says (MessagePack), and for a
step its rows, as they lie in memory. Whoever receives one knows how many bytes its rows are before they come.

| frame | says | then |
|---|---|---|
| STEP | a StageStep | its rows |
| FAILED | a number and a reason: a stage could not run that step | |
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import msgspec

from invoker.engine.contract import EngineError
from invoker.engine.stage_contract import StageStep

HEADER_BYTES = 20
MAX_SAID_BYTES = 8 << 20
MAX_STEP_TOKENS = 16_384
MAX_CHUNKS = 8192
MAX_REASON = 2000  # characters
_MAGIC = b"HCS1"
_FIRST_BYTES = 64 << 10  # of a buffer; it grows with what comes

_HEADER = struct.Struct("<4sBxxxIQ")
_MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class LinkLost(EngineError):
    """The link to another stage is gone, or what came over it is no frame."""

    code = "pipeline_lost"


class FrameKind(IntEnum):
    STEP = 1
    FAILED = 2


class FailedStep(msgspec.Struct, frozen=True, array_like=True):
    """A step that some stage before could not run."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What came: a step with its rows' bytes, which the next frame overwrites, or one that failed."""

    said: StageStep | FailedStep
    rows: memoryview


_encode = msgspec.msgpack.Encoder().encode
_steps = msgspec.msgpack.Decoder(StageStep)
_failures = msgspec.msgpack.Decoder(FailedStep)


def pack_step(step: StageStep, rows_bytes: int) -> bytes:
    """All of a step's frame but its rows."""
    said = _encode(step)
    return _HEADER.pack(_MAGIC, FrameKind.STEP, len(said), rows_bytes) + said


def pack_failed(number: int, reason: str) -> bytes:
    said = _encode(FailedStep(number, reason[:MAX_REASON]))
    return _HEADER.pack(_MAGIC, FrameKind.FAILED, len(said), 0) + said


class FrameReader:
    """Puts frames together from bytes as they come: read into `buffer`, then tell `advance` how many came.

    `rows_bytes_of` says how many bytes of rows belong to a step here. The buffers are used again for each
    frame, and grow to what the largest needs.
    """

    def __init__(self, rows_bytes_of: Callable[[StageStep], int]) -> None:
        self._rows_bytes_of = rows_bytes_of
        self._head = bytearray(HEADER_BYTES)
        self._said = bytearray(_FIRST_BYTES)
        self._rows = bytearray(_FIRST_BYTES)
        self._part = memoryview(self._head)  # what is being filled, from `_filled` on
        self._filled = 0
        self._kind = FrameKind.STEP
        self._rows_bytes = 0
        self._step: StageStep | FailedStep | None = None
        self._in_head = True

    def __repr__(self) -> str:
        return f"<FrameReader {self._filled} of {len(self._part)} bytes>"

    def buffer(self) -> memoryview:
        """Where the next bytes belong; never empty."""
        return self._part[self._filled :]

    def advance(self, count: int) -> Frame | None:
        """So many bytes have come. Raises LinkLost for what is no frame."""
        self._filled += count
        if self._filled < len(self._part):
            return None
        if self._in_head:
            self._read_head()
            return None
        if self._step is None:
            return self._read_said()
        return self._whole()

    def _read_head(self) -> None:
        magic, kind, said_bytes, rows_bytes = _HEADER.unpack(self._head)
        if magic != _MAGIC or kind not in (FrameKind.STEP, FrameKind.FAILED):
            raise LinkLost("what came is no frame of a stage")
        if not 0 < said_bytes <= MAX_SAID_BYTES:
            raise LinkLost(f"a frame says {said_bytes} bytes")
        self._kind, self._rows_bytes, self._in_head = FrameKind(kind), rows_bytes, False
        self._said = _room(self._said, said_bytes)
        self._next(memoryview(self._said)[:said_bytes])

    def _read_said(self) -> Frame | None:
        try:
            if self._kind is FrameKind.FAILED:
                said: StageStep | FailedStep = _failures.decode(self._part)
                wanted = 0
            else:
                said = _steps.decode(self._part)
                _check(said)
                wanted = self._rows_bytes_of(said)
        except _MALFORMED as error:
            raise LinkLost(f"a frame is malformed: {error}") from None
        if wanted != self._rows_bytes:
            raise LinkLost(f"{self._rows_bytes} bytes of rows came for {wanted}")
        self._step = said
        if not wanted:
            return self._whole()
        self._rows = _room(self._rows, wanted)
        self._next(memoryview(self._rows)[:wanted])
        return None

    def _whole(self) -> Frame:
        assert self._step is not None
        frame = Frame(said=self._step, rows=memoryview(self._rows)[: self._rows_bytes])
        self._step, self._in_head = None, True
        self._next(memoryview(self._head))
        return frame

    def _next(self, part: memoryview) -> None:
        self._part, self._filled = part, 0


def _room(buffer: bytearray, nbytes: int) -> bytearray:
    return buffer if len(buffer) >= nbytes else bytearray(nbytes)


def _check(step: StageStep) -> None:
    """Raises LinkLost for a step that nobody can mean; what fits the sequences a stage checks itself."""
    if len(step.chunks) > MAX_CHUNKS or len(step.opened) > len(step.chunks) or step.number < 0:
        raise LinkLost(f"a step of {len(step.chunks)} chunks that opens {len(step.opened)} sequences")
    if len(step.kept) > len(step.closed):
        raise LinkLost(f"a step that keeps {len(step.kept)} of {len(step.closed)} sequences")
    if any(chunk.start < 0 or not 0 < chunk.count <= MAX_STEP_TOKENS for chunk in step.chunks):
        raise LinkLost("a chunk of no tokens")
    if step.tokens > MAX_STEP_TOKENS:
        raise LinkLost(f"a step of {step.tokens} tokens")
