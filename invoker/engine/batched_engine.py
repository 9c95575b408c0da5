"""The common part of engines of whole models: sequences with KV pages, scheduled step by step."""

import logging

from invoker.engine.contract import NewSequence, TokenOutput
from invoker.engine.kv.cache import PAGE_TOKENS
from invoker.engine.kv.pages import PageAllocator
from invoker.engine.sampling import SampledToken
from invoker.engine.scheduling.scheduler import Scheduler, StepLimits, StepPlan
from invoker.engine.scheduling.sequence_table import InvalidSequence, SequenceTable

logger = logging.getLogger(__name__)


class BatchedEngine:
    """A GenerateEngine without `add` and `step`, which subclasses define.

    It has `pages` of KV cache and accepts sequences of at most `longest` tokens with ids in
    `[0, vocabulary)`.
    """

    def __init__(self, pages: int, limits: StepLimits, *, vocabulary: int, longest: int) -> None:
        self._allocator = PageAllocator(pages)
        self._scheduler = Scheduler(limits, self._allocator)
        # The last token of a sequence needs no slot: nothing follows it.
        self._sequences = SequenceTable(vocabulary, min(longest, pages * PAGE_TOKENS))

    @property
    def max_sequence_tokens(self) -> int:
        return self._sequences.max_tokens

    @property
    def kv_tokens(self) -> tuple[int, int]:
        """The tokens of KV cache in use, and in all."""
        return self._allocator.used * PAGE_TOKENS, self._allocator.total * PAGE_TOKENS

    @property
    def has_work(self) -> bool:
        return len(self._sequences) > 0

    @property
    def sequences(self) -> int:
        return len(self._sequences)

    def cancel(self, request_id: str) -> None:
        """Drop a sequence and free its pages; do nothing if there is none of that id."""
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
        """Release what the subclass keeps of a dropped sequence."""

    def _queue(self, sequence: NewSequence, kept: int) -> None:
        """Queue a sequence of which `kept` tokens have K and V already. Raises as `add`."""
        live = self._sequences.open(sequence)
        max_tokens = self._sequences.max_tokens_of(sequence.request_id)
        self._scheduler.add(sequence.request_id, len(live.tokens), sequence.tenant, max_tokens, kept)

    def _cached(self, request_id: str) -> tuple[tuple[int, ...], int]:
        """Return the pages of a sequence and the number of tokens with K and V. Raises InvalidSequence."""
        if request_id not in self._sequences:
            raise InvalidSequence(f"{self!r} has no sequence {request_id}")
        return self._scheduler.cached_pages(request_id)

    def _plan(self) -> StepPlan:
        """Plan the next step of an engine that has work."""
        plan = self._scheduler.plan()
        assert plan.chunks, f"{self!r} has sequences but runs none"
        for request_id in plan.preempted:
            logger.info("sequence %s: preempted, its KV cache will be recomputed", request_id)
        return plan

    def _advance(self, request_id: str, sampled: SampledToken | None, work: int) -> TokenOutput:
        """Append a sampled token to its sequence and return the output of the sequence."""
        output = self._sequences.advance(request_id, sampled, work)
        if output.error or output.finish_reason:
            self.cancel(request_id)
        elif sampled is not None:
            self._scheduler.append_token(request_id)
        return output
