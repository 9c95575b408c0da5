"""What the steps of a pipeline run: pure scheduling, whose steps and tokens others carry to and fro."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
import torch

from invoker.engine.contract import NewSequence, TokenOutput
from invoker.engine.kv_cache import PAGE_TOKENS
from invoker.engine.layout import batch_order
from invoker.engine.pages import PageAllocator
from invoker.engine.sampling import Choice
from invoker.engine.scheduler import Chunk, Limits, Scheduler, StepPlan
from invoker.engine.sequences import SequenceBook, failed_output
from invoker.engine.stage_contract import Opening, StageChunk, StageInput, StageOutput, StageStep


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineShape:
    """A pipeline of `stages` stages, the least of which has `pages` pages for the KV cache of its layers, for
    sequences of at most `context` tokens with ids below `vocabulary`. At most `steps` are under way."""

    stages: int
    pages: int
    context: int
    vocabulary: int
    steps: int


_NOTHING = StepPlan(chunks=(), new_pages=(), preempted=())


class Conductor:
    """The sequences of a pipeline, and the steps in which they are run.

    `next_step` gives steps for the first stage, each a micro-batch: while several are under way, none decodes
    more than its share of the sequences. `take` is given what came out at the head, step by step in order.
    What the stages call its sequences begins with `names`.
    """

    def __init__(self, shape: PipelineShape, limits: Limits, *, names: str = "") -> None:
        self.shape = shape
        self._prefix = names
        max_tokens = min(shape.context, shape.pages * PAGE_TOKENS)
        self._book = SequenceBook(shape.vocabulary, max_tokens)
        self._allocator = PageAllocator(shape.pages)
        self._scheduler = Scheduler(limits, self._allocator)
        self._names: dict[str, str] = {}  # what the stages call the sequences, by request
        self._requests: dict[str, str] = {}  # the other way round
        self._fresh_names = count()
        self._numbers = count()
        self._open: set[str] = set()  # names that the stages know
        self._closing: list[str] = []  # names that they are to forget with the next step
        self._keeping: list[str] = []  # of these, names whose K and V they are to put aside
        self._under_way: dict[int, StageStep] = {}
        self._over: set[int] = set()  # of these, steps that failed before an older one came back
        self._stalled = False

    def __repr__(self) -> str:
        return f"<Conductor {self._scheduler!r}, {len(self._under_way)} steps under way>"

    @property
    def max_sequence_tokens(self) -> int:
        return self._book.max_tokens

    @property
    def sequences(self) -> int:
        return len(self._book)

    @property
    def steps_under_way(self) -> int:
        return len(self._under_way)

    @property
    def has_work(self) -> bool:
        """Whether there is a step under way or to come."""
        return len(self._book) > 0 or bool(self._under_way) or bool(self._closing)

    def add(self, sequence: NewSequence) -> None:
        """Queue a sequence. Raises OutOfKvCache if it can never fit, BadSequence if it makes no sense."""
        live = self._book.open(sequence)
        name = f"{self._prefix}{next(self._fresh_names)}"
        self._names[sequence.request_id], self._requests[name] = name, sequence.request_id
        most = self._book.most_tokens(sequence.request_id)
        self._scheduler.add(name, len(live.tokens), sequence.flow, most)

    def cancel(self, request_id: str) -> None:
        """Drop a sequence; one that is not there (any more) is no error. No output of it comes any more."""
        if self._book.drop(request_id):
            name = self._names.pop(request_id)
            del self._requests[name]
            self._scheduler.remove(name)
            self._close(name)

    def move(self, request_id: str) -> str:
        """Drop a live sequence that goes on elsewhere. What the stages, with one of the next steps, put its
        K and V aside as: "" if they have none."""
        name = self._names[request_id]
        known = name in self._open
        self.cancel(request_id)
        if not known:
            return ""
        self._keeping.append(name)
        return name

    def name_of(self, request_id: str) -> str:
        """What the stages call a live sequence."""
        return self._names[request_id]

    def next_step(self) -> StageInput | None:
        """The next step for the first stage; None while there is nothing to run, or enough is under way. What
        is to be put aside is awaited elsewhere, so that a step goes out for it in any case."""
        if len(self._under_way) >= self.shape.steps or (self._stalled and self._under_way):
            return self._step(_NOTHING) if self._keeping else None
        plan = self._scheduler.plan(self._most_decodes())
        self._stalled = plan.stalled
        for name in plan.preempted:
            self._close(name)
        if not plan.chunks and not self._keeping and (self._under_way or not self._closing):
            return None
        return self._step(plan)

    def take(self, output: StageOutput) -> list[TokenOutput]:
        """What came of a step: the head's output. Nothing if the step was given up."""
        step = self._landed(output.step.number)
        if step is None:
            return []
        choices = {token.sequence: token.choice for token in output.tokens}
        told = []
        for chunk in step.chunks:
            request_id = self._requests.get(chunk.sequence)
            if request_id is not None:  # else it was cancelled
                told.append(self._advance(request_id, chunk, choices.get(chunk.sequence)))
        return told

    def fail(self, number: int, error: str) -> list[TokenOutput]:
        """A step failed on a stage: its sequences end."""
        step = self._landed(number)
        if step is None:
            return []
        self._closing += step.closed  # the stages behind have not heard of it
        self._keeping += step.kept
        ended = []
        for chunk in step.chunks:
            request_id = self._requests.get(chunk.sequence)
            if request_id is not None:
                self.cancel(request_id)
                ended.append(failed_output(request_id, error, chunk.count))
        return ended

    def leave(self) -> list[NewSequence]:
        """End the pipeline: all sequences as they go on elsewhere, with their tokens so far, in the order in
        which they came. A token that is under way is lost here, and comes again there, the same."""
        left = []
        for request_id in list(self._book):
            live = self._book[request_id]
            generated = tuple(live.tokens[len(live.request.prompt_ids) :])
            left.append(replace(live.request, generated_ids=generated))
            self.cancel(request_id)
        for number in list(self._under_way):
            self._landed(number)
        return left

    def check_integrity(self) -> None:
        """Assert that pages, queues and names are consistent."""
        self._scheduler.check_integrity()
        assert len(self._scheduler) == len(self._book) == len(self._names) == len(self._requests)
        assert self._open.isdisjoint(self._closing), "a sequence is open and to be forgotten"
        assert set(self._keeping) <= set(self._closing), "a sequence is kept that is not to be forgotten"
        assert self._open <= self._requests.keys(), "a sequence that nobody has is open"

    def _most_decodes(self) -> int:
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
            kept=tuple(self._keeping),
        )
        self._closing, self._keeping = [], []
        self._under_way[step.number] = step
        return StageInput(step=step, data=self._ids(chunks))

    def _opening(self, name: str) -> Opening:
        request_id = self._requests[name]
        sampling = self._book[request_id].request.sampling
        most = self._book.most_tokens(request_id)
        return Opening(sequence=name, most=most, sampling=sampling, call=request_id)

    def _ids(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        ids: list[int] = []
        for chunk in chunks:
            known = self._book[self._requests[chunk.request_id]].tokens
            ids += known[chunk.start : chunk.start + chunk.count]
        return torch.from_numpy(np.array(ids, dtype=np.int64))

    def _advance(self, request_id: str, chunk: StageChunk, choice: Choice | None) -> TokenOutput:
        """What a chunk gave its sequence."""
        if (choice is not None) != chunk.last:
            told = failed_output(request_id, f"{chunk} came back without what it wants", chunk.count)
        else:
            told = self._book.advance(request_id, choice, chunk.count)
        if told.error or told.finish_reason:
            self.cancel(request_id)
        elif choice is not None:
            self._scheduler.append_token(chunk.sequence)
        return told

    def _landed(self, number: int) -> StageStep | None:
        """A step is not under way any more; None if it was given up. The scheduler hears of it in order."""
        step = self._under_way.get(number)
        if step is None:
            return None
        self._over.add(number)
        while self._under_way and (oldest := next(iter(self._under_way))) in self._over:
            self._over.remove(oldest)
            if self._under_way.pop(oldest).chunks:
                self._scheduler.ran()
        return step
