"""A pipeline stage over a part of a model image: bytes of other layers are never read."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from invoker.engine.contract import DeviceRegion, EngineError, ModelSpec
from invoker.engine.device_memory import kv_memory
from invoker.engine.geometry import Geometry
from invoker.engine.grammars import Grammars, TokenMatcher
from invoker.engine.kv.cache import KvPool, pages_for
from invoker.engine.kv.pages import OutOfPages, PageAllocator
from invoker.engine.kv.slices import KvSlice, export_kv
from invoker.engine.layout import StepLayout, build_layout
from invoker.engine.paths import LayerPath
from invoker.engine.sampling import SamplingRow, sample
from invoker.engine.scheduling.scheduler import Chunk
from invoker.engine.stage import StageExecutor
from invoker.engine.stage_contract import (
    OpenSequence,
    OutOfStep,
    StageChunk,
    StageFacts,
    StageFailed,
    StageInput,
    StageOutput,
    StageStep,
    StageToken,
)
from invoker.engine.weights import bind

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _StageSequence:
    """A sequence of which this stage holds K and V of the first `cached` tokens.

    `tokens` are all tokens so far, if samples depend on them; `matcher` is its state in its grammar.
    """

    opening: OpenSequence
    tokens: list[int]
    matcher: TokenMatcher | None
    pages: tuple[int, ...] = ()
    cached: int = 0


class StageEngine:
    """A Stage of the layers `spec.layers`, of the image in `region`.

    The bytes of these layers must have arrived (of the embedding for layer 0, of the head for the last, see
    image_ranges.py). `kv` is the memory of their KV cache: a region of the arena, or a number of bytes to
    allocate. Raises UnsupportedModel.
    """

    def __init__(
        self,
        spec: ModelSpec,
        region: DeviceRegion,
        kv: DeviceRegion | int,
        *,
        path: LayerPath = LayerPath.AUTO,
        grammars: Grammars | None = None,
    ) -> None:
        bound = bind(spec, region, path)
        self._grammars = grammars or Grammars()
        self.geometry: Geometry = bound.geometry
        self.layers = (bound.first, bound.last)
        self.has_head = bound.has_head
        self.facts = StageFacts(
            row_dtype=bound.dtype,
            row_items=bound.geometry.hidden,
            vocabulary=bound.geometry.vocabulary,
            longest=bound.geometry.longest,
        )
        shape = bound.geometry.kv_shape(bound.last - bound.first, bound.dtype)
        pool = KvPool(shape, kv_memory(kv, bound.device))
        self.pages = pool.pages
        self._stage = StageExecutor(bound, pool)
        self._allocator = PageAllocator(pool.pages)
        self._held: dict[str, _StageSequence] = {}
        self._closed = False

    def __repr__(self) -> str:
        first, last = self.layers
        return f"<StageEngine layers [{first}, {last}), {len(self._held)} sequences, {self._allocator!r}>"

    def run(self, given: StageInput) -> StageOutput:
        """Run the step: see Stage."""
        step = given.step
        self._forget(step.closed)
        for opening in step.opened:
            if opening.sequence in self._held:
                raise OutOfStep(f"sequence {opening.sequence} is open already in {self!r}")
            self._held[opening.sequence] = _StageSequence(
                opening, list(opening.tokens), self._matcher(opening)
            )
        try:
            with torch.inference_mode():
                output = self._run(given)
        except (RuntimeError, MemoryError) as error:  # what torch raises, out of memory included
            logger.exception("step %s of %s sequences failed", step.number, len(step.chunks))
            raise StageFailed(f"layers [{self.layers[0]}, {self.layers[1]}) failed: {error}") from error
        for chunk in step.chunks:
            self._held[chunk.sequence].cached += chunk.count
        return output

    def _matcher(self, opening: OpenSequence) -> TokenMatcher | None:
        """Return the matcher of a sequence where its tokens are sampled; one that fails ends it alone."""
        if not self.has_head:
            return None
        generated = opening.tokens[opening.prompt_tokens :]
        try:
            return self._grammars.matcher(opening.sampling, self.facts.vocabulary, generated)
        except EngineError as error:
            return TokenMatcher(None, str(error))

    def finish(self, given: StageInput) -> StageOutput:
        """Sample the tokens: see Stage."""
        step, rows = given.step, given.data
        sampled_chunks = step.sampled_chunks
        if rows.shape[0] != len(sampled_chunks):
            raise OutOfStep(
                f"{rows.shape[0]} rows for the {len(sampled_chunks)} sampled tokens of step {step.number}"
            )
        # The other sequences were closed while the step was on other stages.
        here = [row for row, chunk in enumerate(sampled_chunks) if chunk.sequence in self._held]
        if not here:
            return StageOutput(step=step, hidden=None)
        try:
            with torch.inference_mode():
                if len(here) < len(sampled_chunks):
                    rows = rows.index_select(0, torch.tensor(here, device=rows.device))
                tokens = self._draw(rows, [sampled_chunks[row] for row in here])
        except (RuntimeError, MemoryError) as error:
            logger.exception("the head failed in step %s", step.number)
            raise StageFailed(f"the head failed: {error}") from error
        return StageOutput(step=step, hidden=None, tokens=tokens)

    def export_kv(self, sequence: str, layers: tuple[int, int] | None = None) -> KvSlice:
        """Return a copy of K and V: see Stage."""
        if sequence not in self._held:
            raise OutOfStep(f"{self!r} has no sequence {sequence}")
        held = self._held[sequence]
        return export_kv(self._stage.pool, self.layers[0], layers, held.pages, held.cached)

    def close(self) -> None:
        """Release the regions: no view of them is left. Idempotent."""
        if not self._closed:
            self._closed = True
            self._forget(tuple(self._held))
            del self._stage

    def check_integrity(self) -> None:
        """Assert that each page has one owner, and that a stage without sequences holds none."""
        self._allocator.check_integrity()
        owned = [page for held in self._held.values() for page in held.pages]
        assert len(owned) == len(set(owned)) == self._allocator.used, "a page is shared or leaked"

    def _forget(self, sequences: Sequence[str]) -> None:
        for name in sequences:
            held = self._held.pop(name, None)
            if held is not None:
                self._allocator.release(held.pages)

    def _run(self, given: StageInput) -> StageOutput:
        step, bound = given.step, self._stage.bound
        if not step.chunks:
            return self._empty_output(step)
        layout = self._layout(step.chunks)
        if given.data.shape[0] != layout.tokens:
            raise OutOfStep(
                f"{given.data.shape[0]} rows for the {layout.tokens} tokens of step {step.number}"
            )
        hidden = self._stage.forward(given.data.to(bound.device), layout)
        if bound.last < bound.geometry.layers or not self.has_head:
            hidden = hidden.contiguous()
            if bound.device.type == "cuda":  # sending would wait; without this the step is not timed
                torch.cuda.synchronize(bound.device)
            return StageOutput(step=step, hidden=hidden)
        return self.finish(StageInput(step=step, data=hidden))

    def _empty_output(self, step: StageStep) -> StageOutput:
        """Return the output of a step without chunks, which only closes sequences."""
        bound = self._stage.bound
        ends = bound.last == bound.geometry.layers and self.has_head
        empty = torch.empty((0, bound.geometry.hidden), dtype=bound.dtype, device=bound.device)
        return StageOutput(step=step, hidden=None if ends else empty)

    def _layout(self, chunks: Sequence[StageChunk]) -> StepLayout:
        """Allocate the pages that each chunk's sequence needs, and lay the step out on them."""
        bound = self._stage.bound
        new_pages: list[int] = []
        placed = []
        for chunk in chunks:
            held = self._held.get(chunk.sequence)
            if held is None or held.cached != chunk.start:
                raise OutOfStep(f"{chunk} does not follow the state of {self!r}: {held}")
            new_pages += self._grow(held, pages_for(chunk.start + chunk.count) - len(held.pages))
            placed.append(
                Chunk(
                    request_id=chunk.sequence,
                    start=chunk.start,
                    count=chunk.count,
                    pages=held.pages,
                    last=chunk.last,
                )
            )
        if new_pages:
            self._stage.pool.clear(torch.tensor(new_pages, device=bound.device))
        return build_layout(placed, bound.dtype, bound.device)

    def _grow(self, held: _StageSequence, count: int) -> tuple[int, ...]:
        try:
            if held.pages:
                new = self._allocator.grow(held.pages, count)
            else:
                new = self._allocator.allocate(count, pages_for(held.opening.max_tokens))
        except OutOfPages as error:
            raise OutOfStep(f"the step needs more pages than {self!r} has: {error}") from error
        held.pages += new
        return new

    def _draw(self, rows: torch.Tensor, sampled_chunks: Sequence[StageChunk]) -> tuple[StageToken, ...]:
        draws = [self._row(chunk) for chunk in sampled_chunks]
        sampled_tokens = sample(self._stage.finish(rows.to(self._stage.bound.device)), draws)
        for chunk, sampled in zip(sampled_chunks, sampled_tokens, strict=True):
            held = self._held[chunk.sequence]
            if held.tokens and sampled.token_id is not None:
                held.tokens.append(sampled.token_id)
        return tuple(
            StageToken(sequence=chunk.sequence, sampled=sampled)
            for chunk, sampled in zip(sampled_chunks, sampled_tokens, strict=True)
        )

    def _row(self, chunk: StageChunk) -> SamplingRow:
        held, position = self._held[chunk.sequence], chunk.start + chunk.count
        return SamplingRow(
            sampling=held.opening.sampling,
            position=position,
            generated=position - held.opening.prompt_tokens,
            tokens=held.tokens,
            matcher=held.matcher,
        )
