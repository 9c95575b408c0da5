"""The engine seam: one model (or a contiguous range of its layers) on one accelerator.

An engine is synchronous and single-threaded; `invoker/engine/runner.py` gives each its own thread
and an asyncio face. Nothing here allocates weight memory: weights are views into `region`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from registry.images.manifest import Manifest
from registry.messages import Sampling, TokenLogprob


class EngineError(Exception):
    """Any failure of an engine. `code` is a channel error code (see registry/messages.py)."""

    code = "internal"


class UnsupportedModel(EngineError):
    """This engine cannot run the architecture."""

    code = "start_failed"


class OutOfKvCache(EngineError):
    """The sequence can never fit the KV cache."""

    code = "out_of_memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What to run: the manifest, the parsed config.json, the compute dtype (`float32`, `bfloat16`, …)
    and the half-open layer range (None: all layers, with embedding and head)."""

    manifest: Manifest
    config: Mapping[str, object]
    dtype: str
    context_length: int
    layers: tuple[int, int] | None = None


class DeviceRegion(Protocol):
    """A reserved range of an accelerator's arena, 256-byte aligned.

    `pointer` is its address on the device. On a CPU node `buffer` is a writable memoryview of it;
    on a GPU `buffer` is None.
    """

    @property
    def nbytes(self) -> int: ...

    @property
    def pointer(self) -> int: ...

    @property
    def device(self) -> str: ...

    @property
    def buffer(self) -> memoryview | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSequence:
    """A sequence to generate: see registry.messages.Generate."""

    request_id: str
    prompt_ids: Sequence[int]
    generated_ids: Sequence[int]
    sampling: Sampling
    flow: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutput:
    """One step's outcome for one sequence. `finish_reason` is "" while it goes on. With `error` set
    the sequence is gone and no token came. `work` is how many of its tokens the step ran: its share of
    the step's time. After a step that ran only a part of a prompt, `token_id` is None too, with neither
    reason nor error. With a reason that says that it moves, `aside` is what the stages call its K and V."""

    request_id: str
    token_id: int | None
    logprob: TokenLogprob | None
    finish_reason: str
    work: int
    error: str = ""
    aside: str = ""


class EngineCall(Protocol):
    """Whom a sequence or a forward is run for. Both methods are called on the loop's thread."""

    def hold(self) -> None:
        """The engine may run something for the call from now on."""
        ...

    def release(self) -> None:
        """It runs nothing for it any more, and what it ran has been metered."""
        ...


class StepMeter(Protocol):
    """Told of each step by the thread that runs it."""

    def began(self) -> None: ...

    def ended(self, work: Sequence[tuple[EngineCall, int]]) -> None:
        """Who shares the time of the step, and by which weights."""
        ...


class GenerateEngine(Protocol):
    """A decoder with continuous batching over a paged KV cache.

    `add`, `cancel` and `step` are called from one thread. `step` runs one batch (a prefill chunk of
    some sequences and one token of the others) and returns what came of it; with nothing to do it
    returns an empty list at once. After `cancel` no output of that sequence appears any more and its
    KV pages are free. One that can be given K and V from elsewhere says of which shape.
    """

    @property
    def max_sequence_tokens(self) -> int: ...

    @property
    def has_work(self) -> bool: ...

    @property
    def sequences(self) -> int: ...

    def add(self, sequence: NewSequence) -> None:
        """Raises OutOfKvCache if it can never fit."""
        ...

    def cancel(self, request_id: str) -> None: ...

    def step(self) -> list[TokenOutput]: ...

    def close(self) -> None: ...


class ComputeEngine(Protocol):
    """An encoder: one call, one forward (see registry.messages.Compute for kinds and arrays)."""

    def compute(
        self,
        kind: str,
        token_ids: Sequence[Sequence[int]],
        pixels: np.ndarray | None,
        pooling: str,
        normalize: bool,
    ) -> dict[str, np.ndarray]: ...

    def close(self) -> None: ...
