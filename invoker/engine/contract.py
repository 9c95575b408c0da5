"""The engine seam: one model (or a contiguous range of its layers) on one accelerator.

An engine is synchronous and single-threaded; `invoker/engine/runner.py` gives each its own thread and an
asyncio interface. Nothing here allocates weight memory: weights are views into `region`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from registry.images.manifest import Manifest
from registry.messages.sampling import Sampling, TokenLogprob
from registry.messages.trace import TraceContext


class EngineError(Exception):
    """A failure of an engine. `code` is a channel error code (see registry/messages/node.py)."""

    code = "internal"


class UnsupportedModel(EngineError):
    """The engine cannot run the model."""

    code = "unsupported_model"


class OutOfKvCache(EngineError):
    """The sequence can never fit the KV cache."""

    code = "out_of_memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model to run: its manifest, the parsed config.json, and the compute dtype (`float32`, `bfloat16`, …).

    `layers` is the half-open layer range; None means all layers, with embedding and head. `held` are the
    bytes `[start, end)` of the image that its region has; None means all.
    """

    manifest: Manifest
    config: Mapping[str, object]
    dtype: str
    context_length: int
    layers: tuple[int, int] | None = None
    held: tuple[int, int] | None = None


class DeviceRegion(Protocol):
    """A reserved range of an accelerator's arena, 256-byte aligned.

    `pointer` is its address on the device. On a CPU node `buffer` is a writable memoryview of it; on a GPU
    `buffer` is None.
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
    """A sequence to generate (see registry.messages.node.Generate). Tenants share the prefill fairly.

    `trace` is passed on to what else runs it: other stages, or another engine's server.
    """

    request_id: str
    prompt_ids: Sequence[int]
    generated_ids: Sequence[int]
    sampling: Sampling
    tenant: str = ""
    trace: TraceContext | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutput:
    """The outcome of one step for one sequence.

    `finish_reason` is "" while the sequence continues. With `error` set the sequence is dropped and has no
    token. `work` is the number of its tokens that the step ran: its share of the step's time. After a step
    that ran only part of a prompt, `token_id` is None too, with neither reason nor error. `exported_kv` is
    the name under which its K and V are exported: with the reason "moved" ("" if there are none), and before
    its prompt runs if it is to be handed off.
    """

    request_id: str
    token_id: int | None
    logprob: TokenLogprob | None
    finish_reason: str
    work: int
    error: str = ""
    exported_kv: str = ""


class EngineCall(Protocol):
    """The billed call that a sequence or a forward is run for. Both methods run on the loop's thread."""

    def hold(self) -> None:
        """Mark that the engine may run something for the call from now on."""
        ...

    def release(self) -> None:
        """Mark that nothing runs for the call any more, and that all of its work has been metered."""
        ...


class StepMeter(Protocol):
    """The meter of an engine, called on the thread that runs the steps, once around each step."""

    def start_step(self) -> None: ...

    def end_step(self, work: Sequence[tuple[EngineCall, int]]) -> None:
        """End the step; its time is divided between the calls by weight."""
        ...


class GenerateEngine(Protocol):
    """A decoder with continuous batching over a paged KV cache.

    `add`, `cancel` and `step` are called from one thread. `step` runs one batch (a prefill chunk of some
    sequences and one token of the others) and returns its outputs; with nothing to do it returns an empty
    list at once. After `cancel` no output of that sequence follows and its KV pages are free. An engine that
    can import K and V has the property `kv_shape`, one with a KV cache of its own `kv_tokens` (see
    BatchedEngine), which any thread may read.
    """

    @property
    def max_sequence_tokens(self) -> int: ...

    @property
    def has_work(self) -> bool: ...

    @property
    def sequences(self) -> int: ...

    def add(self, sequence: NewSequence) -> None:
        """Queue a sequence. Raises OutOfKvCache if it can never fit."""
        ...

    def cancel(self, request_id: str) -> None: ...

    def step(self) -> list[TokenOutput]: ...

    def close(self) -> None: ...


class ComputeEngine(Protocol):
    """An encoder: one call, one forward (see registry.messages.node.Compute for kinds and arrays)."""

    def compute(
        self,
        kind: str,
        token_ids: Sequence[Sequence[int]],
        pixels: np.ndarray | None,
        pooling: str,
        normalize: bool,
    ) -> dict[str, np.ndarray]: ...

    def close(self) -> None: ...
