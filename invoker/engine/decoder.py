"""The decoder engine: continuous batching of sequences over one stage that has all layers."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from invoker.engine.contract import (
    DeviceRegion,
    EngineError,
    ModelSpec,
    NewSequence,
    OutOfKvCache,
    TokenOutput,
    UnsupportedModel,
)
from invoker.engine.cuda_graphs import Capture, graphed_steps
from invoker.engine.device_memory import region_bytes
from invoker.engine.kv_cache import PAGE_TOKENS, KvPool, KvShape
from invoker.engine.layout import build_layout
from invoker.engine.pages import PageAllocator
from invoker.engine.paths import LayerPath
from invoker.engine.sampling import Choice, Draw, sample
from invoker.engine.scheduler import Chunk, Limits, Scheduler, StepPlan
from invoker.engine.stage import StageExecutor
from invoker.engine.weights import bind

logger = logging.getLogger(__name__)

# Prompt tokens of a step while sequences compete: about what a step that decodes can take along for little
# more time, which on an accelerator is bound by reading the weights.
_TURN_TOKENS_CPU = 48
_TURN_TOKENS = 128


class BadSequence(EngineError):
    """The sequence breaks a rule of the engine, whatever the load."""

    code = "bad_request"


@dataclass(slots=True)
class _Sequence:
    """A sequence that has not finished. `tokens` are the prompt and all generated so far."""

    request: NewSequence
    tokens: list[int]
    generated: int
    stops: frozenset[int] = field(default_factory=frozenset)


class DecoderEngine:
    """A GenerateEngine for the families in `families.py`.

    `kv` is the memory of the KV cache: a region of the arena, or a number of bytes to allocate.
    `prefill_budget` is how many prompt tokens a step takes at most, beside the decoded ones, and
    `turn_budget` how many while sequences compete: see `scheduler.Limits`. `capture` records decode steps
    as graphs: see `cuda_graphs.py`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        region: DeviceRegion,
        kv: DeviceRegion | int,
        *,
        max_sequences: int = 64,
        prefill_budget: int = 512,
        turn_budget: int | None = None,
        path: LayerPath = LayerPath.AUTO,
        capture: Capture | Literal["auto", "off"] = "auto",
    ) -> None:
        bound = bind(spec, region, path)
        geometry = bound.geometry
        if (bound.first, bound.last) != (0, geometry.layers):
            raise UnsupportedModel(f"a decoder engine needs all layers, not {spec.layers}")
        shape = KvShape(
            layers=geometry.layers, heads=geometry.kv_heads, head_dim=geometry.head_dim, dtype=bound.dtype
        )
        memory = (
            torch.empty(kv, dtype=torch.uint8, device=bound.device)
            if isinstance(kv, int)
            else region_bytes(kv)
        )
        pool = KvPool(shape, memory)
        self._stage = StageExecutor(bound, pool)
        self._graphs = graphed_steps(self._stage, capture)
        self._allocator = PageAllocator(pool.pages)
        turn = turn_budget or (_TURN_TOKENS_CPU if bound.device.type == "cpu" else _TURN_TOKENS)
        limits = Limits(
            sequences=max_sequences, prefill_tokens=prefill_budget, turn_tokens=min(turn, prefill_budget)
        )
        self._scheduler = Scheduler(limits, self._allocator)
        self._sequences: dict[str, _Sequence] = {}
        self._vocabulary = geometry.vocabulary
        # The last token of a sequence needs no room: nothing follows it.
        self._max_tokens = min(spec.context_length, geometry.longest, pool.pages * PAGE_TOKENS)
        self._closed = False

    def __repr__(self) -> str:
        return f"<DecoderEngine {len(self._sequences)} sequences, {self._scheduler!r}>"

    @property
    def max_sequence_tokens(self) -> int:
        return self._max_tokens

    @property
    def path(self) -> LayerPath:
        """What runs its layers."""
        return self._stage.bound.path

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    @property
    def sequences(self) -> int:
        return len(self._sequences)

    def add(self, sequence: NewSequence) -> None:
        """Queue a sequence. Raises OutOfKvCache if it can never fit, BadSequence if it makes no sense."""
        tokens = [*sequence.prompt_ids, *sequence.generated_ids]
        self._check(sequence, tokens)
        sampling = sequence.sampling
        stops = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stops.update(sampling.eos_token_ids)
        left = sampling.max_tokens - len(sequence.generated_ids)
        most = min(len(tokens) + left, self._max_tokens)
        self._scheduler.add(sequence.request_id, len(tokens), sequence.flow, most)
        self._sequences[sequence.request_id] = _Sequence(
            sequence, tokens, len(sequence.generated_ids), frozenset(stops)
        )

    def cancel(self, request_id: str) -> None:
        """Drop a sequence and free its pages; one that is not there (any more) is no error."""
        if self._sequences.pop(request_id, None) is not None:
            self._scheduler.remove(request_id)

    def step(self) -> list[TokenOutput]:
        """Run one batch. A sequence that only had a part of its prompt run comes with no token yet."""
        if not self._sequences:
            return []
        plan = self._scheduler.plan()
        assert plan.chunks, f"{self!r} has sequences but runs none"
        for request_id in plan.preempted:
            logger.info("sequence %s gave up its KV pages and will be computed again", request_id)
        try:
            sampled, choices = self._run(plan)
        except (RuntimeError, MemoryError) as error:  # what torch raises, out of memory included
            logger.exception("a step with %d sequences failed", len(plan.chunks))
            return self._fail(plan, f"the engine failed in this step: {error}")
        self._scheduler.ran()
        chosen = dict(zip(sampled, choices, strict=True))
        return [
            self._advance(chunk.request_id, chosen.get(chunk.request_id), chunk.count)
            for chunk in plan.chunks
        ]

    def close(self) -> None:
        """Let go of the regions: no view of them is left. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for request_id in list(self._sequences):
            self.cancel(request_id)
        del self._stage, self._graphs

    def check_integrity(self) -> None:
        """Assert that pages and queues are consistent, and that an idle engine holds no page."""
        self._scheduler.check_integrity()
        assert len(self._scheduler) == len(self._sequences), "scheduler and engine disagree"
        assert self._sequences or self._allocator.used == 0, "an idle engine holds pages"

    def _check(self, sequence: NewSequence, tokens: Sequence[int]) -> None:
        request_id, sampling = sequence.request_id, sequence.sampling
        if request_id in self._sequences:
            raise BadSequence(f"sequence {request_id} is running already")
        if not sequence.prompt_ids:
            raise BadSequence("the prompt is empty")
        if len(sequence.generated_ids) >= sampling.max_tokens:
            raise BadSequence(
                f"{len(sequence.generated_ids)} tokens of at most {sampling.max_tokens} are generated already"
            )
        if min(tokens) < 0 or max(tokens) >= self._vocabulary:
            raise BadSequence(f"a token id is outside of [0, {self._vocabulary})")
        if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
            raise BadSequence("temperature and top_k must be 0 or more, top_p above 0 and at most 1")
        if len(tokens) >= self._max_tokens:
            raise OutOfKvCache(
                f"{len(tokens)} tokens leave no room for another within {self._max_tokens} tokens"
            )

    def _run(self, plan: StepPlan) -> tuple[Sequence[str], list[Choice]]:
        """Run a step; which sequences get a token, and their tokens."""
        bound = self._stage.bound
        with torch.inference_mode():
            if plan.new_pages:
                self._stage.pool.clear(torch.tensor(plan.new_pages, device=bound.device))
            sampled, logits = self._logits(plan.chunks)
            if not sampled:
                if bound.device.type == "cuda":  # sampling would wait; without it nothing else times the step
                    torch.cuda.synchronize(bound.device)
                return sampled, []
            draws = [
                Draw(sampling=s.request.sampling, position=len(s.tokens))
                for s in (self._sequences[request_id] for request_id in sampled)
            ]
            return sampled, sample(logits, draws)

    def _logits(self, chunks: Sequence[Chunk]) -> tuple[Sequence[str], torch.Tensor]:
        """Run the chunks; which sequences have logits, and these."""
        bound = self._stage.bound
        if self._graphs is not None:
            logits = self._graphs.run(chunks, self._ids(chunks))
            if logits is not None:
                return [chunk.request_id for chunk in chunks], logits
        layout = build_layout(chunks, bound.dtype, bound.device)
        hidden = self._stage.forward(torch.tensor(self._ids(layout.chunks), device=bound.device), layout)
        return layout.sampled, self._stage.finish(hidden) if layout.sampled else hidden

    def _ids(self, chunks: Sequence[Chunk]) -> list[int]:
        return [
            token
            for chunk in chunks
            for token in self._sequences[chunk.request_id].tokens[chunk.start : chunk.start + chunk.count]
        ]

    def _advance(self, request_id: str, choice: Choice | None, work: int) -> TokenOutput:
        """Take a sequence's choice in, and say what came of it."""
        if choice is None:
            return TokenOutput(
                request_id=request_id, token_id=None, logprob=None, finish_reason="", work=work
            )
        if choice.token_id is None:
            self.cancel(request_id)
            return _error(request_id, "the model's output is not a number", work)
        sequence = self._sequences[request_id]
        sequence.tokens.append(choice.token_id)
        sequence.generated += 1
        reason = self._finish_reason(sequence)
        if reason:
            self.cancel(request_id)
        else:
            self._scheduler.append_token(request_id)
        return TokenOutput(
            request_id=request_id,
            token_id=choice.token_id,
            logprob=choice.logprob,
            finish_reason=reason,
            work=work,
        )

    def _finish_reason(self, sequence: _Sequence) -> str:
        if sequence.tokens[-1] in sequence.stops:
            return "stop"
        full = len(sequence.tokens) >= self._max_tokens
        return "length" if full or sequence.generated >= sequence.request.sampling.max_tokens else ""

    def _fail(self, plan: StepPlan, error: str) -> list[TokenOutput]:
        """Drop the sequences of a failed step: what their pages hold is unknown."""
        for chunk in plan.chunks:
            self.cancel(chunk.request_id)
        return [_error(chunk.request_id, error, chunk.count) for chunk in plan.chunks]


def _error(request_id: str, message: str, work: int) -> TokenOutput:
    return TokenOutput(
        request_id=request_id, token_id=None, logprob=None, finish_reason="", work=work, error=message
    )
