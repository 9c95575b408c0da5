"""The scheduler of a pipeline's steps: pure; the caller carries steps and tokens between the stages."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch

from invoker.engine.contract import NewSequence, TokenOutput
from invoker.engine.kv.cache import PAGE_TOKENS
from invoker.engine.kv.pages import PageAllocator
from invoker.engine.layout import batch_order
from invoker.engine.sampling import SampledToken
from invoker.engine.scheduling.scheduler import Chunk, Scheduler, StepLimits, StepPlan
from invoker.engine.scheduling.sequence_table import SequenceTable, failed_output
from invoker.engine.stage_contract import OpenSequence, StageChunk, StageInput, StageOutput, StageStep


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineShape:
    """A pipeline of `stages` stages with at most `steps` steps in flight.

    `pages` is the smallest number of KV cache pages of a stage for its layers. Sequences have at most
    `context` tokens, with ids below `vocabulary`.
    """

    stages: int
    pages: int
    context: int
    vocabulary: int
    steps: int


_NOTHING = StepPlan(chunks=(), new_pages=(), preempted=())


class PipelineScheduler:
    """The sequences of a pipeline, and the steps in which they are run.

    `next_step` plans steps for the first stage, each a micro-batch: while several are in flight, none decodes
    more than its share of the sequences. `complete_step` takes the head's outputs, step by step in order. The
    stages' names of its sequences begin with `names`.
    """

    def __init__(self, shape: PipelineShape, limits: StepLimits, *, names: str = "") -> None:
        self.shape = shape
        self._prefix = names
        max_tokens = min(shape.context, shape.pages * PAGE_TOKENS)
        self._table = SequenceTable(shape.vocabulary, max_tokens)
        self._allocator = PageAllocator(shape.pages)
        self._scheduler = Scheduler(limits, self._allocator)
        self._names: dict[str, str] = {}  # the stages' names of the sequences, by request
        self._requests: dict[str, str] = {}  # requests by name
        self._fresh_names = count()
        self._numbers = count()
        self._open: set[str] = set()  # names that the stages hold
        self._closing: list[str] = []  # names to close with the next step
        self._exporting: list[str] = []  # those of `_closing` to export
        self._in_flight: dict[int, StageStep] = {}
        self._landed_early: set[int] = set()  # steps in flight that returned before an older one
        self._stalled = False

    def __repr__(self) -> str:
        return f"<PipelineScheduler {self._scheduler!r}, {len(self._in_flight)} steps in flight>"

    @property
    def max_sequence_tokens(self) -> int:
        return self._table.max_tokens

    @property
    def sequences(self) -> int:
        return len(self._table)

    @property
    def steps_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        """Whether there is a step in flight or to plan."""
        return len(self._table) > 0 or bool(self._in_flight) or bool(self._closing)

    def add(self, sequence: NewSequence) -> None:
        """Queue a sequence. Raises OutOfKvCache if it can never fit, InvalidSequence if it breaks a rule."""
        live = self._table.open(sequence)
        name = f"{self._prefix}{next(self._fresh_names)}"
        self._names[sequence.request_id], self._requests[name] = name, sequence.request_id
        max_tokens = self._table.max_tokens_of(sequence.request_id)
        self._scheduler.add(name, len(live.tokens), sequence.tenant, max_tokens)

    def cancel(self, request_id: str) -> None:
        """Drop a sequence, of which no output follows; do nothing if there is none of that id."""
        if self._table.drop(request_id):
            name = self._names.pop(request_id)
            del self._requests[name]
            self._scheduler.remove(name)
            self._close(name)

    def move(self, request_id: str) -> str:
        """Drop a live sequence that continues elsewhere; return the name of its exported K and V.

        The stages export with one of the next steps. Returns "" if no stage has any.
        """
        name = self._names[request_id]
        known = name in self._open
        self.cancel(request_id)
        if not known:
            return ""
        self._exporting.append(name)
        return name

    def stage_name(self, request_id: str) -> str:
        """Return the stages' name of a live sequence."""
        return self._names[request_id]

    def next_step(self) -> StageInput | None:
        """Return the next step for the first stage; None if there is nothing to run, or enough in flight.

        Exports are awaited elsewhere, so that a step goes out for them in any case.
        """
        if len(self._in_flight) >= self.shape.steps or (self._stalled and self._in_flight):
            return self._step(_NOTHING) if self._exporting else None
        plan = self._scheduler.plan(self._max_decodes())
        self._stalled = plan.stalled
        for name in plan.preempted:
            self._close(name)
        if not plan.chunks and not self._exporting and (self._in_flight or not self._closing):
            return None
        return self._step(plan)

    def complete_step(self, output: StageOutput) -> list[TokenOutput]:
        """Apply the head's output of a step; return the outputs, none if it is not in flight."""
        step = self._land(output.step.number)
        if step is None:
            return []
        sampled = {token.sequence: token.sampled for token in output.tokens}
        outputs = []
        for chunk in step.chunks:
            request_id = self._requests.get(chunk.sequence)
            if request_id is not None:  # else it was cancelled
                outputs.append(self._advance(request_id, chunk, sampled.get(chunk.sequence)))
        return outputs

    def fail_step(self, number: int, error: str) -> list[TokenOutput]:
        """End the sequences of a step that failed on a stage; return their last outputs."""
        step = self._land(number)
        if step is None:
            return []
        self._closing += step.closed  # the stages behind did not receive it
        self._exporting += step.exported
        ended = []
        for chunk in step.chunks:
            request_id = self._requests.get(chunk.sequence)
            if request_id is not None:
                self.cancel(request_id)
                ended.append(failed_output(request_id, error, chunk.count))
        return ended

    def check_integrity(self) -> None:
        """Assert that pages, queues and names are consistent."""
        self._scheduler.check_integrity()
        assert len(self._scheduler) == len(self._table) == len(self._names) == len(self._requests)
        assert self._open.isdisjoint(self._closing), "a sequence is both open and closing"
        assert set(self._exporting) <= set(self._closing), "a sequence is exported that is not closing"
        assert self._open <= self._requests.keys(), "an open sequence has no request"

    def _max_decodes(self) -> int:
        at_once = min(self.shape.stages, self.shape.steps)
        return max(1, -(-self._scheduler.running // at_once))

    def _close(self, name: str) -> None:
        if name in self._open:
            self._open.remove(name)
            self._closing.append(name)

    def _step(self, plan: StepPlan) -> StageInput:
        chunks = batch_order(plan.chunks)
        names = [chunk.request_id for chunk in chunks]
        opened = tuple([self._opening(name) for name in names if name not in self._open])
        self._open.update(names)
        step = StageStep(
            number=next(self._numbers),
            closed=tuple(self._closing),
            opened=opened,
            chunks=tuple(
                [StageChunk(sequence=c.request_id, start=c.start, count=c.count, last=c.last) for c in chunks]
            ),
            exported=tuple(self._exporting),
        )
        self._closing, self._exporting = [], []
        self._in_flight[step.number] = step
        return StageInput(step=step, data=self._ids(chunks))

    def _opening(self, name: str) -> OpenSequence:
        request_id = self._requests[name]
        live = self._table[request_id]
        sampling = live.request.sampling
        return OpenSequence(
            sequence=name,
            max_tokens=self._table.max_tokens_of(request_id),
            sampling=sampling,
            call=request_id,
            prompt_tokens=len(live.tokens) - live.generated,
            tokens=tuple(live.tokens) if sampling.counts_tokens else (),
            trace=live.request.trace,
        )

    def _ids(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        ids: list[int] = []
        for chunk in chunks:
            known = self._table[self._requests[chunk.request_id]].tokens
            ids += known[chunk.start : chunk.start + chunk.count]
        return torch.from_numpy(np.array(ids, dtype=np.int64))

    def _advance(self, request_id: str, chunk: StageChunk, sampled: SampledToken | None) -> TokenOutput:
        """Apply the result of a chunk to its sequence."""
        if (sampled is not None) != chunk.last:
            output = failed_output(
                request_id, f"{chunk} returned {'no token' if chunk.last else 'a token'}", chunk.count
            )
        else:
            output = self._table.advance(request_id, sampled, chunk.count)
        if output.error or output.finish_reason:
            self.cancel(request_id)
        elif sampled is not None:
            self._scheduler.append_token(chunk.sequence)
        return output

    def _land(self, number: int) -> StageStep | None:
        """Take a step out of flight, completing steps in order; return None if it is not in flight."""
        step = self._in_flight.get(number)
        if step is None:
            return None
        self._landed_early.add(number)
        while self._in_flight and (oldest := next(iter(self._in_flight))) in self._landed_early:
            self._landed_early.remove(oldest)
            if self._in_flight.pop(oldest).chunks:
                self._scheduler.step_done()
        return step
