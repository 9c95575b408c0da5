"""Decode steps replayed as CUDA graphs, so that a GPU does not wait for Python between two kernels.

A step in which every sequence runs one token is rounded up to a *bucket*: a number of sequences and of pages
a sequence. The first step of a bucket is captured over tensors with fixed addresses; later ones fill these
and replay. Rows that pad a batch repeat its first row: they compute the same numbers and write them to the
same slot, so no page is reserved for them.

None of this has been run on a GPU yet; what needs no GPU is tested with a capture that only calls.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch

from invoker.engine.kv.cache import PAGE_TOKENS, pages_for
from invoker.engine.layout import AttentionCall
from invoker.engine.paths import LayerPath
from invoker.engine.scheduling.scheduler import Chunk
from invoker.engine.stage import StageExecutor

logger = logging.getLogger(__name__)

_MIN_PAGES = 16
_MAX_SEQUENCES = 64
# A step copies the pages that it attends to, padding included: with more, padding costs more than it saves.
_MAX_PAGES = 8192
_WARM_UPS = 2

Replay = Callable[[], torch.Tensor]


class GraphCapture(Protocol):
    """Captures the kernels of `run`; the replay recomputes them and returns the same tensor each time."""

    def __call__(self, run: Callable[[], torch.Tensor]) -> Replay: ...


class CudaCapture:
    """The CUDA GraphCapture. Its graphs share their memory: a result is valid until the next replay."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, run: Callable[[], torch.Tensor]) -> Replay:
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream(self._device)
            try:
                return self._captured(run, current)
            except BaseException:
                # A capture that became invalid raises at its end, before it puts the stream back.
                torch.cuda.set_stream(current)
                raise

    def _captured(self, run: Callable[[], torch.Tensor], current: torch.cuda.Stream) -> Replay:
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):  # libraries make their workspaces before the capture
            for _ in range(_WARM_UPS):
                run()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads (engines, loads) may allocate during the capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = run()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphBucket:
    """The size of a captured step."""

    sequences: int
    pages: int


def bucket_for(chunks: Sequence[Chunk]) -> GraphBucket | None:
    """Return the smallest bucket that fits a step, None if it is no decode step or too large."""
    if not chunks or any(chunk.count != 1 or not chunk.last for chunk in chunks):
        return None
    sequences = _power_of_two(len(chunks))
    pages = max(_MIN_PAGES, _power_of_two(max(pages_for(chunk.start + 1) for chunk in chunks)))
    if sequences > _MAX_SEQUENCES or sequences * pages > _MAX_PAGES:
        return None
    return GraphBucket(sequences=sequences, pages=pages)


class StaticStep:
    """The AttentionMetadata of one token a sequence, in tensors with fixed addresses."""

    def __init__(self, bucket: GraphBucket, dtype: torch.dtype, device: torch.device) -> None:
        self.bucket = bucket
        self._dtype = dtype
        n = bucket.sequences
        # One allocation, so that one copy fills all tensors.
        self._memory = torch.zeros(n * (3 + bucket.pages), dtype=torch.int64, device=device)
        self.ids, self.positions, self.slots = (self._memory[i * n : (i + 1) * n] for i in range(3))
        self._pages = self._memory[3 * n :]
        self._keys = torch.arange(bucket.pages * PAGE_TOKENS, device=device)
        self._calls: dict[int | None, tuple[AttentionCall, ...]] = {}

    def fill(self, chunks: Sequence[Chunk], ids: Sequence[int]) -> None:
        """Copy a step that fits the bucket into the tensors; `ids` are its tokens."""
        self._memory.copy_(torch.from_numpy(static_inputs(self.bucket, chunks, ids)))

    def begin(self) -> None:
        """Drop the cached masks, which depend on the positions."""
        self._calls = {}

    def calls(self, window: int | None) -> tuple[AttentionCall, ...]:
        if window not in self._calls:
            self._calls[window] = (self._call(window),)
        return self._calls[window]

    def _call(self, window: int | None) -> AttentionCall:
        last = self.positions[:, None]
        visible = self._keys <= last
        if window is not None:
            visible &= self._keys > last - window
        mask = torch.zeros_like(visible, dtype=self._dtype).masked_fill_(~visible, float("-inf"))
        return AttentionCall(
            first=0,
            last=self.bucket.sequences,
            sequences=self.bucket.sequences,
            queries=1,
            runs=(),
            pages=self._pages,
            key_first=0,
            key_last=self.bucket.pages * PAGE_TOKENS,
            fresh=False,
            mask=mask[:, None, None, :],
        )


def static_inputs(bucket: GraphBucket, chunks: Sequence[Chunk], ids: Sequence[int]) -> np.ndarray:
    """Return ids, positions, slots and page tables of a step, padded to its bucket: one flat int64 array."""
    rows = np.arange(bucket.sequences)
    rows[len(chunks) :] = 0
    positions = np.array([chunk.start for chunk in chunks])
    pages = np.array([chunk.pages[chunk.start // PAGE_TOKENS] for chunk in chunks])
    slots = pages * PAGE_TOKENS + positions % PAGE_TOKENS
    table = np.empty((len(chunks), bucket.pages), dtype=np.int64)
    for row, chunk in zip(table, chunks, strict=True):
        used = chunk.pages[: pages_for(chunk.start + 1)]
        row[: len(used)] = used
        row[len(used) :] = used[0]  # masked, and never another sequence's numbers
    return np.concatenate([np.array(ids)[rows], positions[rows], slots[rows], table[rows].ravel()])


class GraphedSteps:
    """The captured decode steps of a stage that has the whole model."""

    def __init__(self, stage: StageExecutor, capture: GraphCapture) -> None:
        self._stage = stage
        self._capture: GraphCapture | None = capture
        self._steps: dict[GraphBucket, tuple[StaticStep, Replay]] = {}

    def __repr__(self) -> str:
        return f"<GraphedSteps {len(self._steps)}{'' if self._capture else ', disabled'}>"

    def run(self, chunks: Sequence[Chunk], ids: Sequence[int]) -> torch.Tensor | None:
        """Return the logits, `[chunks, vocabulary]`, valid until the next call; None if no graph fits."""
        bucket = bucket_for(chunks)
        if bucket is None or self._capture is None:
            return None
        if bucket in self._steps:
            step, replay = self._steps[bucket]
            step.fill(chunks, ids)
        else:
            step = StaticStep(bucket, self._stage.bound.dtype, self._stage.bound.device)
            step.fill(chunks, ids)
            try:
                replay = self._capture(lambda: self._compute(step))
            except RuntimeError:
                logger.exception("capture of a step of %s failed: CUDA graphs are disabled", bucket)
                self._capture = None
                return None
            self._steps[bucket] = step, replay
        return replay()[: len(chunks)]

    def _compute(self, step: StaticStep) -> torch.Tensor:
        step.begin()
        return self._stage.decode(step.ids, step)


def graphed_steps(
    stage: StageExecutor, capture: GraphCapture | Literal["auto", "off"]
) -> GraphedSteps | None:
    """Return the graphs of a stage; with "auto" only for fused layers on a GPU."""
    if capture == "off":
        return None
    if capture != "auto":
        return GraphedSteps(stage, capture)
    bound = stage.bound
    if bound.device.type != "cuda" or bound.path is not LayerPath.FUSED:
        return None
    return GraphedSteps(stage, CudaCapture(bound.device))


def _power_of_two(minimum: int) -> int:
    """Return the smallest power of two that is at least `minimum`."""
    return 1 << (minimum - 1).bit_length()
