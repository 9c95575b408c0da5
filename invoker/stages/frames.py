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

    `rows_bytes_of` says how many bytes of rows belong to a step here. A small frame takes one read, which may
    bring more that follows; of a large one's rows most are read to where they stay. The buffers are used
    again for each frame, and grow to what the largest needs.
    """

    def __init__(self, rows_bytes_of: Callable[[StageStep], int]) -> None:
        self._rows_bytes_of = rows_bytes_of
        self._came = memoryview(bytearray(_FIRST_BYTES))
        self._begin, self._end = 0, 0  # of what lies there that no frame was made of yet
        self._rows = memoryview(bytearray(_FIRST_BYTES))
        self._wanted = self._rows[:0]  # the rows of `_said`, which have come up to `_filled`
        self._filled = 0
        self._said: StageStep | FailedStep | None = None

    def __repr__(self) -> str:
        return f"<FrameReader {self._end - self._begin + self._filled} bytes of a frame>"

    def buffer(self) -> memoryview:
        """Where the next bytes belong; never empty."""
        if self._said is not None:
            return self._wanted[self._filled :]
        return self._came[self._end :]

    def advance(self, count: int) -> Frame | None:
        """So many bytes have come; with 0, what had come before may be a frame. Raises LinkLost for what is
        no frame."""
        if self._said is not None:
            self._filled += count
        else:
            self._end += count
            self._said = self._read_said()
        said, wanted = self._said, self._wanted
        if said is None or self._filled < len(wanted):
            return None
        self._said, self._filled = None, 0
        return Frame(said=said, rows=wanted)

    def _read_said(self) -> StageStep | FailedStep | None:
        """What the next frame says, if that has come; of its rows that have come too, a copy is made."""
        came = self._end - self._begin
        if came < HEADER_BYTES:
            self._make_room(HEADER_BYTES)
            return None
        magic, kind, said_bytes, rows_bytes = _HEADER.unpack_from(self._came, self._begin)
        if magic != _MAGIC or kind not in (FrameKind.STEP, FrameKind.FAILED):
            raise LinkLost("what came is no frame of a stage")
        if not 0 < said_bytes <= MAX_SAID_BYTES:
            raise LinkLost(f"a frame says {said_bytes} bytes")
        if came < HEADER_BYTES + said_bytes:
            self._make_room(HEADER_BYTES + said_bytes)
            return None
        first = self._begin + HEADER_BYTES
        said, wanted = self._decoded(kind, self._came[first : first + said_bytes])
        if wanted != rows_bytes:
            raise LinkLost(f"{rows_bytes} bytes of rows came for {wanted}")
        self._begin = first + said_bytes
        self._take_rows(wanted)
        return said

    def _decoded(self, kind: int, said: memoryview) -> tuple[StageStep | FailedStep, int]:
        """What is said, and how many bytes of rows belong to it."""
        try:
            if kind == FrameKind.FAILED:
                return _failures.decode(said), 0
            step = _steps.decode(said)
            _check(step)
            return step, self._rows_bytes_of(step)
        except _MALFORMED as error:
            raise LinkLost(f"a frame is malformed: {error}") from None

    def _take_rows(self, wanted: int) -> None:
        if len(self._rows) < wanted:
            self._rows = memoryview(bytearray(wanted))
            self._wanted = self._rows
        if len(self._wanted) != wanted:  # else it is the same view as before: see RowsOf
            self._wanted = self._rows[:wanted]
        self._filled = min(wanted, self._end - self._begin)
        if self._filled:
            self._wanted[: self._filled] = self._came[self._begin : self._begin + self._filled]
        self._begin += self._filled
        if self._begin == self._end:
            self._begin = self._end = 0

    def _make_room(self, frame_bytes: int) -> None:
        """For all of a frame, of which less has come, but its rows."""
        if not self._begin and len(self._came) >= frame_bytes:
            return
        left = bytes(self._came[self._begin : self._end])
        if len(self._came) < frame_bytes:
            self._came = memoryview(bytearray(frame_bytes))
        self._came[: len(left)] = left
        self._begin, self._end = 0, len(left)


def _check(step: StageStep) -> None:
    """Raises LinkLost for a step that nobody can mean; what fits the sequences a stage checks itself."""
    if len(step.chunks) > MAX_CHUNKS or len(step.opened) > len(step.chunks) or step.number < 0:
        raise LinkLost(f"a step of {len(step.chunks)} chunks that opens {len(step.opened)} sequences")
    if len(step.kept) > len(step.closed):
        raise LinkLost(f"a step that keeps {len(step.kept)} of {len(step.closed)} sequences")
    tokens = 0
    for chunk in step.chunks:
        if chunk.start < 0 or not 0 < chunk.count <= MAX_STEP_TOKENS:
            raise LinkLost("a chunk of no tokens")
        tokens += chunk.count
    if tokens > MAX_STEP_TOKENS:
        raise LinkLost(f"a step of {tokens} tokens")
