"""Frames between the stages of a pipeline, and their bounds (pure).

| message | payload |
|---|---|
| StageStep | its rows, as they are in memory |
| FailedStep | none |
"""

from collections.abc import Callable

import msgspec

from invoker.engine.stage_contract import StageStep
from invoker.links.framing import FrameFormat, FrameReader, LinkLost

MAX_MESSAGE_BYTES = 8 << 20
MAX_STEP_TOKENS = 16_384
MAX_CHUNKS = 8192
MAX_REASON = 2000  # characters


class FailedStep(msgspec.Struct, frozen=True, array_like=True):
    """A step that an earlier stage could not run."""

    number: int
    reason: str


StageMessage = StageStep | FailedStep
STAGE_FRAMES: FrameFormat[StageMessage] = FrameFormat(
    b"HCS1", (StageStep, FailedStep), max_message_bytes=MAX_MESSAGE_BYTES
)


def encode_step(step: StageStep, rows_bytes: int) -> memoryview:
    """Return a step's frame without its rows."""
    return STAGE_FRAMES.encode(step, rows_bytes)


def encode_failed(number: int, reason: str) -> memoryview:
    """Return the frame of a failed step."""
    return STAGE_FRAMES.encode(FailedStep(number, reason[:MAX_REASON]))


def stage_reader(rows_bytes_of: Callable[[StageStep], int]) -> FrameReader[StageMessage]:
    """Return a reader of stage frames; `rows_bytes_of` returns the size of a step's rows at this stage."""
    return FrameReader(STAGE_FRAMES, _RowsBuffer(rows_bytes_of), read_ahead=True)


class _RowsBuffer:
    """The receive buffer of rows, reused for each step; it grows to the largest one.

    Equal sizes get the same view, of which StageRows keeps the tensor.
    """

    def __init__(self, rows_bytes_of: Callable[[StageStep], int]) -> None:
        self._rows_bytes_of = rows_bytes_of
        self._buffer = memoryview(bytearray(64 << 10))
        self._view = self._buffer[:0]

    def __call__(self, message: StageMessage, payload_bytes: int) -> memoryview:
        expected = 0
        if isinstance(message, StageStep):
            _check(message)
            expected = self._rows_bytes_of(message)
        if expected != payload_bytes:
            raise LinkLost(f"{payload_bytes} bytes of rows, expected {expected}")
        if len(self._buffer) < expected:
            self._buffer = self._view = memoryview(bytearray(expected))
        if len(self._view) != expected:
            self._view = self._buffer[:expected]
        return self._view


def _check(step: StageStep) -> None:
    """Raise LinkLost for a step beyond the bounds; the stage checks it against its sequences."""
    if len(step.chunks) > MAX_CHUNKS or len(step.opened) > len(step.chunks) or step.number < 0:
        raise LinkLost(f"invalid step: {len(step.chunks)} chunks, {len(step.opened)} opened sequences")
    if len(step.exported) > len(step.closed):
        raise LinkLost(f"invalid step: {len(step.exported)} exported of {len(step.closed)} closed sequences")
    tokens = 0
    for chunk in step.chunks:
        if chunk.start < 0 or not 0 < chunk.count <= MAX_STEP_TOKENS:
            raise LinkLost(f"invalid step: a chunk of {chunk.count} tokens at {chunk.start}")
        tokens += chunk.count
    if tokens > MAX_STEP_TOKENS:
        raise LinkLost(f"invalid step: {tokens} tokens, maximum {MAX_STEP_TOKENS}")
