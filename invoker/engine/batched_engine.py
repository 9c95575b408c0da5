"""What engines of whole models have alike: sequences with KV pages, a part of which each step runs."""

import logging

from invoker.engine.contract import NewSequence, TokenOutput
from invoker.engine.kv_cache import PAGE_TOKENS
from invoker.engine.pages import PageAllocator
from invoker.engine.sampling import Choice
from invoker.engine.scheduler import Limits, Scheduler, StepPlan
from invoker.engine.sequences import BadSequence, SequenceBook

logger = logging.getLogger(__name__)


class BatchedEngine:
    """A GenerateEngine but for `add` and `step`, which are the engine's own. It has `pages` of a KV cache,
    and takes sequences of at most `longest` tokens with ids below `vocabulary`."""

    def __init__(self, pages: int, limits: Limits, *, vocabulary: int, longest: int) -> None:
        self._allocator = PageAllocator(pages)
        self._scheduler = Scheduler(limits, self._allocator)
        # The last token of a sequence needs no room: nothing follows it.
        self._sequences = SequenceBook(vocabulary, min(longest, pages * PAGE_TOKENS))

    @property
    def max_sequence_tokens(self) -> int:
        return self._sequences.max_tokens

    @property
    def has_work(self) -> bool:
        return len(self._sequences) > 0

    @property
    def sequences(self) -> int:
        return len(self._sequences)

    def cancel(self, request_id: str) -> None:
        """Drop a sequence and free its pages; one that is not there (any more) is no error."""
        if self._sequences.drop(request_id):
            self._scheduler.remove(request_id)
            self._forget(request_id)

    def close(self) -> None:
        """Drop all sequences. Idempotent."""
        for request_id in list(self._sequences):
            self.cancel(request_id)

    def check_integrity(self) -> None:
        """Assert that pages and queues are consistent, and that an idle engine holds no page."""
        self._scheduler.check_integrity()
        assert len(self._scheduler) == len(self._sequences), "scheduler and engine disagree"
        assert self.has_work or self._allocator.used == 0, "an idle engine holds pages"

    def _forget(self, request_id: str) -> None:
        """A sequence is gone: let go of what else there is of it."""

    def _queue(self, sequence: NewSequence, kept: int) -> None:
        """Take a sequence in, of which the K and V of `kept` tokens are there. Raises as `add`."""
        live = self._sequences.open(sequence)
        most = self._sequences.most_tokens(sequence.request_id)
        self._scheduler.add(sequence.request_id, len(live.tokens), sequence.flow, most, kept)

    def _cached(self, request_id: str) -> tuple[tuple[int, ...], int]:
        """The pages of a sequence, and how many tokens' K and V are there. Raises BadSequence."""
        if request_id not in self._sequences:
            raise BadSequence(f"{self!r} has no sequence {request_id}")
        return self._scheduler.held(request_id)

    def _plan(self) -> StepPlan:
        """The next step of an engine that has work."""
        plan = self._scheduler.plan()
        assert plan.chunks, f"{self!r} has sequences but runs none"
        for request_id in plan.preempted:
            logger.info("sequence %s gave up its KV pages and will be computed again", request_id)
        return plan

    def _advance(self, request_id: str, choice: Choice | None, work: int) -> TokenOutput:
        """Take a sequence's choice in, and say what came of it."""
        output = self._sequences.advance(request_id, choice, work)
        if output.error or output.finish_reason:
            self.cancel(request_id)
        elif choice is not None:
            self._scheduler.append_token(request_id)
        return output
