"""The decoder engine: continuous batching of sequences over one stage that has all layers."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import torch

from invoker.engine.batched_engine import BatchedEngine
from invoker.engine.contract import DeviceRegion, ModelSpec, NewSequence, TokenOutput, UnsupportedModel
from invoker.engine.cuda_graphs import GraphCapture, graphed_steps
from invoker.engine.device_memory import kv_memory
from invoker.engine.grammars import Grammars, TokenMatcher
from invoker.engine.kv.cache import KvPool
from invoker.engine.kv.entry import EntryFormat, LayerEntry
from invoker.engine.kv.slices import KvSlice, export_kv, import_kv, usable_tokens
from invoker.engine.layer_segments import layer_segments
from invoker.engine.layout import build_layout
from invoker.engine.paths import LayerPath
from invoker.engine.sampling import SampledToken, SamplingRow, sample
from invoker.engine.scheduling.scheduler import PREFILL_TOKENS, Chunk, StepLimits, StepPlan
from invoker.engine.scheduling.sequence_table import failed_output
from invoker.engine.stage import StageExecutor
from invoker.engine.weights import bind

logger = logging.getLogger(__name__)

# Prompt tokens of a step while tenants compete: about as many as a decode step can add for little more time,
# since a decode step on an accelerator is bound by reading the weights.
_SHARED_PREFILL_TOKENS_CPU = 48
_SHARED_PREFILL_TOKENS = 128


def limits_for(
    device_type: str,
    *,
    sequences: int,
    prefill_tokens: int = PREFILL_TOKENS,
    shared_prefill_tokens: int | None = None,
) -> StepLimits:
    """Return the limits of a step on a device of that type."""
    turn = shared_prefill_tokens or (
        _SHARED_PREFILL_TOKENS_CPU if device_type == "cpu" else _SHARED_PREFILL_TOKENS
    )
    return StepLimits(
        sequences=sequences, prefill_tokens=prefill_tokens, shared_prefill_tokens=min(turn, prefill_tokens)
    )


class DecoderEngine(BatchedEngine):
    """A GenerateEngine for the families in `families.py`.

    `kv` is the memory of the KV cache: a region of the arena, or a number of bytes to allocate.
    `prefill_budget` is the maximum number of prompt tokens a step takes beside the decoded ones, and
    `shared_prefill_budget` the maximum while tenants compete: see `scheduler.StepLimits`. `capture` captures
    decode steps as CUDA graphs. `grammars` has the tokenizers of sequences with a grammar.
    """

    def __init__(
        self,
        spec: ModelSpec,
        region: DeviceRegion,
        kv: DeviceRegion | int,
        *,
        max_sequences: int = 64,
        prefill_budget: int = PREFILL_TOKENS,
        shared_prefill_budget: int | None = None,
        path: LayerPath = LayerPath.AUTO,
        capture: GraphCapture | Literal["auto", "off"] = "auto",
        grammars: Grammars | None = None,
    ) -> None:
        bound = bind(spec, region, path)
        geometry = bound.geometry
        if (bound.first, bound.last) != (0, geometry.layers):
            raise UnsupportedModel(f"a decoder engine needs all layers, not {spec.layers}")
        pool = KvPool(geometry.kv_shape(geometry.layers, bound.dtype), kv_memory(kv, bound.device))
        self._stage = StageExecutor(bound, pool)
        self._graphs = graphed_steps(self._stage, capture)
        limits = limits_for(
            bound.device.type,
            sequences=max_sequences,
            prefill_tokens=prefill_budget,
            shared_prefill_tokens=shared_prefill_budget,
        )
        longest = min(spec.context_length, geometry.longest)
        super().__init__(pool.pages, limits, vocabulary=geometry.vocabulary, longest=longest)
        self._step_tokens = limits.entering_tokens
        self._grammars = grammars or Grammars()
        self._matchers: dict[str, TokenMatcher] = {}
        self._arriving: dict[str, tuple[KvSlice, ...]] = {}  # K and V of sequences that have not run yet
        self._closed = False

    def __repr__(self) -> str:
        return f"<DecoderEngine {len(self._sequences)} sequences, {self._scheduler!r}>"

    @property
    def entry_format(self) -> EntryFormat:
        """The format of the entries that `add` accepts."""
        bound = self._stage.bound
        return EntryFormat(
            kv=self._stage.pool.shape,
            row_dtype=bound.dtype,
            row_items=bound.geometry.hidden,
            step_tokens=self._step_tokens,
        )

    @property
    def path(self) -> LayerPath:
        """The implementation that runs the layers."""
        return self._stage.bound.path

    def add(self, sequence: NewSequence, kv: Sequence[KvSlice] = (), entry: LayerEntry | None = None) -> None:
        """Queue a sequence. Raises OutOfKvCache if it can never fit, InvalidSequence if it breaks a rule.

        `kv` is K and V of its first tokens, computed elsewhere, in slices that cover all layers: only the
        tokens after them are run, unless the sequence is preempted: then all are. The slices are kept until
        it runs. With `entry` all of its tokens run, through the other layers; it is kept until they have.
        """
        known = len(sequence.prompt_ids) + len(sequence.generated_ids)
        kept = usable_tokens(self._stage.pool.shape, kv, known)
        if entry is not None:
            self.entry_format.check(entry, known)
        vocabulary = self._stage.bound.geometry.vocabulary
        matcher = self._grammars.matcher(sequence.sampling, vocabulary, sequence.generated_ids)
        self._queue(sequence, kept, entry)
        if matcher is not None:
            self._matchers[sequence.request_id] = matcher
        if kept:
            self._arriving[sequence.request_id] = tuple(kv)

    def export_kv(self, request_id: str, layers: tuple[int, int] | None = None) -> KvSlice:
        """Return a copy of the K and V of a sequence, between two steps. Raises InvalidSequence."""
        pages, cached = self._cached(request_id)
        return export_kv(self._stage.pool, 0, layers, pages, cached)

    def step(self) -> list[TokenOutput]:
        """Run one batch. The output of a sequence that ran only part of its prompt has no token."""
        if not self.has_work:
            return []
        plan = self._plan()
        try:
            sampled, tokens = self._run(plan)
        except (RuntimeError, MemoryError) as error:  # what torch raises, out of memory included
            logger.exception("a step with %d sequences failed", len(plan.chunks))
            return self._fail(plan, f"the engine failed in this step: {error}")
        finally:
            self._scheduler.step_done()
        chosen = dict(zip(sampled, tokens, strict=True))
        return [self._advance(chunk, chosen.get(chunk.request_id)) for chunk in plan.chunks]

    def close(self) -> None:
        """Release the regions: no view of them is left. Idempotent."""
        if self._closed:
            return
        self._closed = True
        super().close()
        del self._stage, self._graphs

    def _forget(self, request_id: str) -> None:
        self._arriving.pop(request_id, None)
        self._matchers.pop(request_id, None)

    def _run(self, plan: StepPlan) -> tuple[Sequence[str], list[SampledToken]]:
        """Run a step; return the ids of the sequences that get a token, and their tokens."""
        bound = self._stage.bound
        with torch.inference_mode():
            if plan.new_pages:
                self._stage.pool.clear(torch.tensor(plan.new_pages, device=bound.device))
            self._import_arrived(plan.chunks)
            sampled, logits = self._logits(plan.chunks)
            if not sampled:
                if bound.device.type == "cuda":  # no sampling synchronizes, so the step would not be timed
                    torch.cuda.synchronize(bound.device)
                return sampled, []
            draws = [
                SamplingRow(
                    sampling=live.request.sampling,
                    position=len(live.tokens),
                    generated=live.generated,
                    tokens=live.tokens,
                    matcher=self._matchers.get(request_id),
                )
                for request_id, live in ((one, self._sequences[one]) for one in sampled)
            ]
            return sampled, sample(logits, draws)

    def _import_arrived(self, chunks: Sequence[Chunk]) -> None:
        """Write imported K and V to the pages of each sequence: once, and only what no chunk computes."""
        pool = self._stage.pool
        for chunk in chunks if self._arriving else ():
            slices = self._arriving.pop(chunk.request_id, None)
            if slices and chunk.start:
                import_kv(pool, chunk.pages, slices, chunk.start)
        for chunk in chunks if self._entries else ():
            entry = self._entries.get(chunk.request_id)
            if entry is not None and not chunk.start:
                import_kv(pool, chunk.pages, [entry.kv], entry.kv.tokens)

    def _logits(self, chunks: Sequence[Chunk]) -> tuple[Sequence[str], torch.Tensor]:
        """Run the chunks; return the ids of the sequences with logits, and the logits `[ids, vocabulary]`."""
        bound = self._stage.bound
        if self._graphs is not None:
            logits = self._graphs.run(chunks, self._ids(chunks))
            if logits is not None:
                return [chunk.request_id for chunk in chunks], logits
        inputs: dict[str, torch.Tensor] = {}  # of each chunk's next layer
        for segment in layer_segments(chunks, self._entries, bound.last):
            layout = build_layout(segment.chunks, bound.dtype, bound.device)
            if segment.first:
                rows = torch.cat([self._rows(chunk, inputs) for chunk in layout.chunks])
            else:
                rows = torch.tensor(self._ids(layout.chunks), device=bound.device)
            with self._exporting(layout.chunks):
                hidden = self._stage.forward(rows, layout, (segment.first, segment.last))
            if segment.last < bound.last:
                outputs = hidden.split([chunk.count for chunk in layout.chunks])
                inputs = {c.request_id: own for c, own in zip(layout.chunks, outputs, strict=True)}
        return layout.sampled, self._stage.finish(hidden) if layout.sampled else hidden

    def _rows(self, chunk: Chunk, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the input of a chunk's next layer: from the one before, or where it enters."""
        if chunk.request_id in inputs:
            return inputs[chunk.request_id]
        rows = self._entries[chunk.request_id].rows[chunk.start : chunk.start + chunk.count]
        return rows.to(self._stage.bound.device)

    @contextmanager
    def _exporting(self, chunks: Sequence[Chunk]) -> Iterator[None]:
        """Export K and V of each layer that runs while the block lasts.

        Not from a GPU, which would wait for each layer's copy: what is missing is copied after the prompt.
        """
        pool, exported = self._stage.pool, tuple(self._exported(chunks))
        if not exported or self._stage.bound.device.type != "cpu":
            yield
            return

        def write(layer: int, entries: torch.Tensor) -> None:
            for export, chunk, row in exported:
                export.write(layer, chunk.start, entries[row : row + chunk.count].transpose(0, 1))

        pool.on_write = write
        try:
            yield
        finally:
            pool.on_write = None

    def _ids(self, chunks: Sequence[Chunk]) -> list[int]:
        return [
            token
            for chunk in chunks
            for token in self._sequences[chunk.request_id].tokens[chunk.start : chunk.start + chunk.count]
        ]

    def _fail(self, plan: StepPlan, error: str) -> list[TokenOutput]:
        """Drop the sequences of a failed step: the content of their pages is unknown."""
        failed = [(chunk, self._work(chunk)) for chunk in plan.chunks]
        for chunk in plan.chunks:
            self.cancel(chunk.request_id)
        return [failed_output(chunk.request_id, error, work) for chunk, work in failed]
