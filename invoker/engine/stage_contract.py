"""The seam of a pipeline: the data that passes from stage to stage, and the contract of a stage.

A pipeline is a chain of stages, each with a contiguous range of a model's layers. A *step* passes through all
of them in order: token ids enter the first, hidden states pass from one to the next, and the output of the
last goes to the stage with the head: the last stage itself, or with a tied head the first again. There a
token is sampled for each sequence that needs one. Steps follow each other without waiting, and each stage
takes them in the same order, so that what a step says of a sequence holds for all later steps.
"""

from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import torch

from invoker.engine.contract import EngineError
from invoker.engine.kv.slices import KvSlice
from invoker.engine.sampling import SampledToken
from registry.messages.sampling import Sampling
from registry.messages.trace import TraceContext

_NUMPY_HAS = frozenset({torch.float32, torch.float16, torch.int64})  # of the dtypes that rows may have


class OutOfStep(EngineError):
    """The input of a stage does not follow its earlier input."""


class StageFailed(EngineError):
    """A stage could not compute a step; the state of the step's sequences is unknown."""


class OpenSequence(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence that a stage does not hold yet.

    `sequence` is unique in its pipeline; it may grow to `max_tokens` tokens. Where the head is, its tokens
    are sampled by `sampling`, those after the first `prompt_tokens`. It is run for `call`, whose `trace` the
    stages continue. `tokens` are all so far if samples depend on them.
    """

    sequence: str
    max_tokens: int
    sampling: Sampling
    call: str = ""
    prompt_tokens: int = 0
    tokens: tuple[int, ...] = ()
    trace: TraceContext | None = None


class StageChunk(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens at the positions `[start, start + count)` of a sequence, which follow its earlier chunks.

    With `last` a token is sampled for the position `start + count`.
    """

    sequence: str
    start: int
    count: int
    last: bool


class StageStep(msgspec.Struct, frozen=True, kw_only=True):
    """What one step does, the same for all stages: drop `closed`, open `opened`, run `chunks`.

    Of the closed sequences, those in `exported` continue elsewhere: the stage exports their K and V. `chunks`
    are in batch order (see layout.batch_order). Their tokens, one chunk after the other, are the rows of the
    data that goes with the step; behind the last layer only the last row of each chunk with `last` is left.
    `number` counts a pipeline's steps.
    """

    number: int
    closed: tuple[str, ...]
    opened: tuple[OpenSequence, ...]
    chunks: tuple[StageChunk, ...]
    exported: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        return sum([chunk.count for chunk in self.chunks])

    @property
    def sampled_chunks(self) -> tuple[StageChunk, ...]:
        """The chunks after which a token is sampled."""
        return tuple([chunk for chunk in self.chunks if chunk.last])


@dataclass(frozen=True, slots=True, kw_only=True)
class StageInput:
    """A step and its rows, contiguous.

    On the first stage the rows are token ids, int64 `[tokens]`; on the others hidden states in the model's
    dtype, `[tokens, hidden]`; for `finish` only those of the sampled chunks, normed. The stage reads `data`
    until it returns and keeps no view of it, so that `data` may be in a reused buffer.
    """

    step: StageStep
    data: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StageToken:
    """A token sampled for a sequence."""

    sequence: str
    sampled: SampledToken


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOutput:
    """The output of a stage for one step.

    `hidden` is the next stage's data, contiguous and owned by the receiver. On the stage with the head it is
    None, and `tokens` holds the sampled tokens: none for sequences that were closed meanwhile. `device_s` is
    the duration of the step where the stage measures it better than a clock around it.
    """

    step: StageStep
    hidden: torch.Tensor | None
    tokens: tuple[StageToken, ...] = ()
    device_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFacts:
    """The model that a stage is part of.

    A row between stages is `row_items` items of `row_dtype`; token ids are below `vocabulary`, sequences have
    at most `longest` tokens. `shared_prefill_tokens` is the best number of prompt tokens of a step while
    tenants compete (None: the default of the device).
    """

    row_dtype: torch.dtype
    row_items: int
    vocabulary: int
    longest: int
    shared_prefill_tokens: int | None = None

    @property
    def row_bytes(self) -> int:
        return self.row_items * self.row_dtype.itemsize


class Stage(Protocol):
    """One stage of a pipeline. All methods are called on one thread."""

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
        """The number of KV cache pages for all its sequences together."""
        ...

    def run(self, given: StageInput) -> StageOutput:
        """Run the step on the stage's layers; on the last stage, if it has the head, sample the tokens too.

        Raises StageFailed, OutOfStep.
        """
        ...

    def finish(self, given: StageInput) -> StageOutput:
        """Sample the tokens of a step of which another stage ran the last layers: for a tied head."""
        ...

    def export_kv(self, sequence: str, layers: tuple[int, int] | None = None) -> KvSlice:
        """Return a copy of a sequence's K and V in `layers`, which the stage must have. Raises OutOfStep."""
        ...

    def close(self) -> None:
        """Release all memory. Idempotent."""
        ...


def rows_as_bytes(rows: torch.Tensor) -> memoryview:
    """Return rows as bytes for a socket to send: a view, unless the rows are on an accelerator."""
    if not rows.is_cpu:
        rows = rows.cpu()
    if rows.dtype not in _NUMPY_HAS:
        rows = rows.view(torch.uint8)
    return rows.numpy().reshape(-1).view(np.uint8).data


def rows_from_bytes(received: memoryview, dtype: torch.dtype, width: int) -> torch.Tensor:
    """Return received bytes as hidden states `[rows, width]`: a view of the writable buffer."""
    if not len(received):
        return torch.empty((0, width), dtype=dtype)
    return torch.frombuffer(received, dtype=dtype).view(-1, width)
