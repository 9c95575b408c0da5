"""The seam of a pipeline: what goes from stage to stage, and what a stage does with it.

A pipeline is a chain of stages, each with a contiguous range of a model's layers. A *step* passes through
all of them in order: token ids go into the first, hidden states from one to the next, and what comes out of
the last goes to where the head is: the last stage itself, or with a tied head the first again. There a token
is drawn for each sequence that wants one. Steps follow each other without waiting, and each stage takes
them in the same order, so that what a step says of a sequence holds for all behind it.
"""

from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import torch

from invoker.engine.contract import EngineError
from invoker.engine.kv_slices import KvSlice
from invoker.engine.sampling import Choice
from registry.messages import Sampling

_NUMPY_HAS = frozenset({torch.float32, torch.float16, torch.int64})  # of what rows may be


class OutOfStep(EngineError):
    """What a stage was given does not follow what it had before."""


class StageFailed(EngineError):
    """A stage could not compute a step; what it holds of the step's sequences is unknown."""


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence that a stage has not seen, or was told to forget. `sequence` is unique in its pipeline; it
    may grow to `most` tokens; where the head is its tokens are drawn by `sampling`. It is run for `call`."""

    sequence: str
    most: int
    sampling: Sampling
    call: str = ""


class StageChunk(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens at the positions `[start, start + count)` of a sequence, which follow those that it ran
    before. With `last` a token is wanted, for the position `start + count`."""

    sequence: str
    start: int
    count: int
    last: bool


class StageStep(msgspec.Struct, frozen=True, kw_only=True):
    """What one step does, the same for all stages: forget `closed`, expect `opened`, run `chunks`.

    Of `kept`, which are closed too, K and V are wanted elsewhere: what the stage has of them is put aside.
    `chunks` stand as in a batch (see layout.batch_order). Their tokens, one chunk after the other, are the
    rows of the data that goes with the step; behind the last layer only the last row of each chunk with
    `last` is left. `number` counts a pipeline's steps.
    """

    number: int
    closed: tuple[str, ...]
    opened: tuple[Opening, ...]
    chunks: tuple[StageChunk, ...]
    kept: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        return sum([chunk.count for chunk in self.chunks])

    @property
    def wanting(self) -> tuple[StageChunk, ...]:
        """The chunks behind which a token is wanted."""
        return tuple([chunk for chunk in self.chunks if chunk.last])


@dataclass(frozen=True, slots=True, kw_only=True)
class StageInput:
    """A step and its rows, contiguous: on the first stage token ids, int64 `[tokens]`; on the others hidden
    states in the model's dtype, `[tokens, hidden]`; for `finish` those of the wanted tokens only, normed.

    The stage reads `data` until it returns and keeps no view of it, so it may lie in a buffer for reuse.
    """

    step: StageStep
    data: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StageToken:
    """What was drawn for a sequence."""

    sequence: str
    choice: Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOutput:
    """What came of a step. `hidden` is the next stage's data, contiguous and nobody else's; where the head
    is it is None, and `tokens` has what was drawn: none for sequences that were closed meanwhile. `device_s`
    is what the step took, of a stage that knows better than a clock beside it."""

    step: StageStep
    hidden: torch.Tensor | None
    tokens: tuple[StageToken, ...] = ()
    device_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFacts:
    """The model that a stage is part of. A row between stages is `row_items` items of `row_dtype`; token ids
    are below `vocabulary`, sequences have at most `longest` tokens. `turn_tokens` is how many of prompts a
    step takes best while sequences compete (None: what is usual for the device)."""

    row_dtype: torch.dtype
    row_items: int
    vocabulary: int
    longest: int
    turn_tokens: int | None = None

    @property
    def row_bytes(self) -> int:
        return self.row_items * self.row_dtype.itemsize


class Stage(Protocol):
    """One stage. All methods are called by one thread."""

    @property
    def facts(self) -> StageFacts: ...

    @property
    def layers(self) -> tuple[int, int]:
        """The half-open range `[first, last)`."""
        ...

    @property
    def has_head(self) -> bool: ...

    @property
    def pages(self) -> int:
        """How many pages of KV cache its sequences can have together."""
        ...

    def run(self, given: StageInput) -> StageOutput:
        """Run the step on the stage's layers; on the last stage, if the head is there, draw the tokens too.
        Raises StageFailed, OutOfStep."""
        ...

    def finish(self, given: StageInput) -> StageOutput:
        """Draw the tokens of a step whose last layers another stage ran: where a tied head is."""
        ...

    def export_kv(self, sequence: str, layers: tuple[int, int] | None = None) -> KvSlice:
        """A copy of a sequence's K and V in these of its layers. Raises OutOfStep."""
        ...

    def close(self) -> None:
        """Let go of all memory. Idempotent."""
        ...


def rows_as_bytes(rows: torch.Tensor) -> memoryview:
    """Rows as the bytes that they are, for a socket to send: a view, unless they are on an accelerator."""
    if not rows.is_cpu:
        rows = rows.cpu()
    if rows.dtype not in _NUMPY_HAS:
        rows = rows.view(torch.uint8)
    return rows.numpy().reshape(-1).view(np.uint8).data


def rows_of_bytes(received: memoryview, dtype: torch.dtype, width: int) -> torch.Tensor:
    """Hidden states `[rows, width]` in bytes that were received: a view of a writable buffer."""
    if not len(received):
        return torch.empty((0, width), dtype=dtype)
    return torch.frombuffer(received, dtype=dtype).view(-1, width)
