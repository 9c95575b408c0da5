"""The scheduler of an engine: which tokens run in the next step. Pure, plain data in and out.

Sequences are in the queue of their tenant. Within a queue they are admitted in order of arrival; between
queues with prompts to run, the one with fewer prompt tokens run is served first (start-time fair queueing,
Goyal et al., SIGCOMM 1996), so that a newcomer's prompt does not wait behind the prompts of a tenant that
sent many. A tenant's only prompt, once started, is not interrupted by a tenant with several: that one
continues when it has run, and is credited as much. What a tenant runs while no other has a backlog is not
charged. Every admitted sequence decodes in every step, with one exception: a step, never two in a row, that
belongs to a newcomer beside a tenant with several sequences.

When pages run out, the youngest sequence of a queue is preempted: it returns to the head of its queue with
its tokens, and is recomputed later.

Several plans may be in flight, as in a pipeline: a prompt's next chunk can follow at once, its next token
only after the last chunk has returned, and a sequence in flight is not preempted.
"""

import math
from collections import Counter, deque
from dataclasses import dataclass

from invoker.engine.kv.cache import PAGE_TOKENS, pages_for
from invoker.engine.kv.pages import PageAllocator
from invoker.engine.scheduling.tenant_queues import ScheduledSequence, TenantQueue, next_queue

PREFILL_TOKENS = 512  # prompt tokens of a step, at most, unless set otherwise
# In layers that ran elsewhere an accelerator reads the weights for decoded tokens alone, which takes as long
# as to compute `shared_prefill_tokens` there: with so many times as many, behind half of the layers, it is a
# seventh of the step. With more, prompts wait longer for their step than they gain.
_ENTERING_FACTOR = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """The limits of a step: at most `sequences` admitted at once, and a number of prompt tokens.

    A step takes one token of each decoding sequence, and beside these prompts: at most `prefill_tokens` if a
    tenant's only sequence is first, or if the engine was idle and no tenant waits beside one with several;
    else at most `shared_prefill_tokens`. So the steps of a tenant with many prompts are short: a newcomer
    waits only until the current one ends, and so do the decoding sequences, into the steps of which a long
    prompt is spread. Prompts of which the first layers ran elsewhere count by the layers that they have left;
    while there are some, a step takes `entering_tokens`.
    """

    sequences: int
    prefill_tokens: int
    shared_prefill_tokens: int

    def __post_init__(self) -> None:
        if min(self.sequences, self.prefill_tokens, self.shared_prefill_tokens) < 1:
            raise ValueError(f"limits must be at least 1: {self}")

    @property
    def entering_tokens(self) -> int:
        """The prompt tokens of a step with a prompt that enters behind some layers."""
        return _ENTERING_FACTOR * self.shared_prefill_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The tokens `[start, start + count)` of a sequence, to be run. `pages` hold its tokens in order.

    With `last` the chunk ends at the sequence's last known token, so its logits yield the next one.
    """

    request_id: str
    start: int
    count: int
    pages: tuple[int, ...]
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The chunks of one step, the pages allocated for it, and the preempted sequences.

    `stalled` if a sequence waits for room that only sequences in flight hold: once they return a plan can
    preempt them.
    """

    chunks: tuple[Chunk, ...]
    new_pages: tuple[int, ...]
    preempted: tuple[str, ...]
    stalled: bool = False


class Scheduler:
    """Plans steps. Sequences are added, planned, and after each step extended by a token or removed."""

    def __init__(self, limits: StepLimits, allocator: PageAllocator) -> None:
        self._limits = limits
        self._allocator = allocator
        self._sequences: dict[str, ScheduledSequence] = {}
        self._queues: dict[str, TenantQueue] = {}  # those with sequences
        self._ahead: dict[str, int] = {}  # tags of queues that emptied while others had a backlog
        self._now = 0  # the virtual time: the tag of the queue served last
        self._paused = False  # the last step belonged to a newcomer: nothing decoded
        self._running: list[ScheduledSequence] = []  # in order of admission: the first is never preempted
        self._arrivals = 0
        # The sequences of each plan, the oldest first.
        self._in_flight: deque[tuple[ScheduledSequence, ...]] = deque()
        self._plans = 0
        self._stalled = False

    def __repr__(self) -> str:
        waiting = len(self._sequences) - len(self._running)
        return f"<Scheduler {len(self._running)} running, {waiting} waiting, {self._allocator!r}>"

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    @property
    def running(self) -> int:
        """The number of sequences with pages."""
        return len(self._running)

    def add(
        self,
        request_id: str,
        length: int,
        tenant: str = "",
        max_tokens: int = 0,
        imported: int = 0,
        share: float = 1.0,
    ) -> None:
        """Queue a sequence of `length` known tokens, which must fit all pages together.

        It may grow to `max_tokens`: adjacent pages are claimed for it while no other sequence needs them. The
        first `imported` tokens are not run if its first chunk begins behind them. Its prompt has a `share` of
        the layers left to run, unless it is preempted: then it has all of them.
        """
        assert request_id not in self._sequences, f"{request_id} is there already"
        assert 1 <= length <= self._allocator.total * PAGE_TOKENS, f"{length} tokens can never fit"
        assert 0 <= imported < length, f"of {length} tokens at least one must be run"
        assert 0 < share <= 1, f"a prompt cannot run {share} of the layers"
        if tenant not in self._queues:
            self._queues[tenant] = TenantQueue(tenant, self._ahead.pop(tenant, 0))
        queue = self._queues[tenant]
        sequence = ScheduledSequence(
            request_id, queue, self._arrivals, length, max_tokens, imported, share=share
        )
        self._arrivals += 1
        self._sequences[request_id] = sequence
        sequence.queue.waiting.append(sequence)

    def remove(self, request_id: str) -> None:
        """Drop a sequence, finished or not, and free its pages."""
        sequence = self._sequences.pop(request_id)
        queue = sequence.queue
        if sequence.pages:
            self._running.remove(sequence)
            queue.running.remove(sequence)
        else:
            queue.waiting.remove(sequence)
        self._allocator.release(sequence.pages)
        if not queue:
            del self._queues[queue.name]
            self._ahead[queue.name] = queue.tag

    def cached_pages(self, request_id: str) -> tuple[tuple[int, ...], int]:
        """Return a sequence's pages, and its number of tokens with K and V once its plans have run."""
        sequence = self._sequences[request_id]
        return sequence.pages, sequence.cached

    def step_done(self) -> None:
        """Record that the oldest plan in flight has run: the K and V of its chunks are in the pages.

        After a failed step they are not, so its sequences must be removed. A plan without chunks is never in
        flight.
        """
        if self._in_flight:
            for sequence in self._in_flight.popleft():
                sequence.in_flight -= 1

    def append_token(self, request_id: str) -> None:
        """Record that a sequence has grown by the token that its last chunk yielded."""
        sequence = self._sequences[request_id]
        assert sequence.cached == sequence.length, f"{request_id} is not at its end"
        sequence.length += 1

    def plan(self, max_decodes: int | None = None) -> StepPlan:
        """Plan the next step, with at most `max_decodes` decoding sequences: those planned longest ago.

        The plan has no chunks if there is nothing to do; such a plan is not in flight.
        """
        self._stalled = False
        new_pages: list[int] = []
        preempted: list[str] = []
        index = 0
        while index < len(self._running):
            sequence = self._running[index]
            new_pages += self._grow(index, preempted)
            index += bool(sequence.pages)  # else it was preempted, and another is at `index`
        prefill = self._share_prefill(new_pages, preempted)
        self._paused = not self._paused and self._serves_newcomer(prefill)
        decoding = [sequence for sequence in self._running if sequence.decodes and not self._paused]
        if max_decodes is not None:
            decoding = sorted(decoding, key=lambda sequence: sequence.last_plan)[:max_decodes]
        return StepPlan(
            chunks=self._launch({sequence.request_id for sequence in decoding}, prefill),
            new_pages=tuple(new_pages),
            preempted=tuple(preempted),
            stalled=self._stalled,
        )

    def check_integrity(self) -> None:
        """Assert that pages have one owner, and that each queue is in order of arrival."""
        self._allocator.check_integrity()
        owned = [page for sequence in self._sequences.values() for page in sequence.pages]
        assert len(owned) == len(set(owned)) == self._allocator.used, "a page is shared or leaked"
        for queue in self._queues.values():
            order = [s.arrival for s in (*queue.running, *queue.waiting)]
            assert order == sorted(order), "a younger sequence is ahead of an older one"
            assert order, f"the queue of {queue.name} is empty"
            assert queue.running == [s for s in self._running if s.queue is queue], "the order of admission"
            for sequence in queue.waiting:
                assert not sequence.pages and not sequence.cached, f"{sequence} waits with pages"
        assert sum(map(len, self._queues.values())) == len(self._sequences), "a sequence is lost"
        for sequence in self._running:
            room = len(sequence.pages) * PAGE_TOKENS
            assert sequence.cached <= min(room, sequence.length), f"{sequence} has outgrown its pages"

    def _launch(self, decoding: set[str], prefill: Counter[str]) -> tuple[Chunk, ...]:
        """Return the chunks of a plan, which is in flight from now on."""
        self._plans += 1
        chunks, run = [], []
        for sequence in self._running:
            count = 1 if sequence.request_id in decoding else prefill[sequence.request_id]
            if count:
                chunks.append(_chunk(sequence, count))
                run.append(sequence)
                sequence.cached += count
                sequence.in_flight += 1
                sequence.last_plan = self._plans
        if chunks:
            self._in_flight.append(tuple(run))
        return tuple(chunks)

    # Pages.

    def _grow(self, index: int, preempted: list[str]) -> tuple[int, ...]:
        """Allocate the pages for all tokens of the running sequence at `index`, preempting younger ones.

        If there is none to preempt, it is preempted itself. Returns no pages if it has to wait for plans in
        flight.
        """
        sequence = self._running[index]
        needed = pages_for(sequence.length) - len(sequence.pages)
        if not needed:
            return ()
        while needed > self._allocator.free:
            victim = self._youngest_from(index)
            if victim.in_flight:
                self._stalled = True
                return ()
            self._preempt(victim, preempted)
            if victim is sequence:
                return ()
        new = self._allocator.grow(sequence.pages, needed)
        sequence.pages += new
        return new

    def _youngest_from(self, index: int) -> ScheduledSequence:
        """Return the youngest sequence, at `index` or after, of the queue that holds the most pages.

        A queue's only running sequence is returned only where all are such, and then the one admitted last.
        """
        last = {one.queue: one for one in self._running[index:] if len(one.queue.running) > 1}
        if not last:
            return self._running[-1]
        return last[max(last, key=lambda queue: queue.pages)]

    def _preempt(self, sequence: ScheduledSequence, preempted: list[str]) -> None:
        self._running.remove(sequence)
        sequence.queue.running.remove(sequence)
        self._allocator.release(sequence.pages)
        sequence.pages, sequence.cached, sequence.share = (), 0, 1.0
        sequence.queue.waiting.appendleft(sequence)
        preempted.append(sequence.request_id)

    def _admit(self, sequence: ScheduledSequence, prefill: Counter[str], preempted: list[str]) -> bool:
        """Admit the first waiting sequence of its queue if there is, or can be, room."""
        needed = pages_for(sequence.length)
        if len(self._running) >= self._limits.sequences or needed > self._allocator.free:
            victims = self._victims_for(sequence.queue, needed, prefill)
            if not victims:
                return False
            for victim in victims:
                self._preempt(victim, preempted)
        sequence.queue.running.append(sequence.queue.waiting.popleft())
        self._running.append(sequence)
        sequence.pages = self._allocator.allocate(needed, pages_for(sequence.max_tokens))
        sequence.cached, sequence.imported = sequence.imported, 0
        return True

    def _victims_for(self, queue: TenantQueue, needed: int, prefill: Counter[str]) -> list[ScheduledSequence]:
        """Return the sequences to preempt so that an idle queue can run a sequence of `needed` pages.

        They are the youngest of queues that hold more than their share, but no queue's only one. Empty if
        that does not make enough room.
        """
        if queue.running:
            return []
        page_share = self._allocator.total // len(self._queues)
        slot_share = self._limits.sequences // len(self._queues)
        left = {other: list(other.running) for other in self._queues.values()}
        held = {other: other.pages for other in left}
        free, slots = self._allocator.free, self._limits.sequences - len(self._running)
        victims: list[ScheduledSequence] = []
        while free < needed or slots < 1:
            rich = [
                other
                for other, running in left.items()
                if len(running) > 1
                and (held[other] > page_share or len(running) > slot_share)
                and running[-1].request_id not in prefill
            ]
            if not rich:
                return []
            richest = max(rich, key=lambda other: held[other])
            victim = left[richest].pop()
            victims.append(victim)
            held[richest] -= len(victim.pages)
            free += len(victim.pages)
            slots += 1
        if any(victim.in_flight for victim in victims):
            self._stalled = True
            return []
        return victims

    # Prompts.

    def _share_prefill(self, new_pages: list[int], preempted: list[str]) -> Counter[str]:
        """Return the number of prompt tokens of each sequence in this step, admitting waiting sequences."""
        prefill: Counter[str] = Counter()
        limits = self._limits
        admits = not preempted  # a preempted sequence must not be admitted by the same step
        prompts = self._backlogged()
        crowded = len(prompts) > 1 and any(len(queue) > 1 for queue in prompts)
        left: float = limits.shared_prefill_tokens if self._running or crowded else limits.prefill_tokens
        if any(one.share < 1 for own in prompts.values() for one in own):
            left = max(left, limits.entering_tokens)
        while left > 0 and prompts:
            queue = next_queue(prompts)
            sequence = prompts[queue].popleft()
            if not prompts[queue]:
                del prompts[queue]
            if not sequence.pages:
                # After one that found no room none is admitted, so that room for it becomes free.
                admits = admits and self._admit(sequence, prefill, preempted)
                if not admits:
                    continue
                admits = not preempted
                new_pages += sequence.pages
            alone = len(queue) == 1 and not prefill
            most = max(left, limits.prefill_tokens) if alone else left
            count = min(sequence.uncached, max(1, int(most / sequence.share)))
            prefill[sequence.request_id] = count
            cost = count * sequence.share
            self._now = max(self._now, queue.tag)
            queue.tag += math.ceil(cost)
            left = 0 if self._serves_newcomer(prefill) else left - cost
        return prefill

    def _serves_newcomer(self, prefill: Counter[str]) -> bool:
        """Return whether the first prompt is a queue's only sequence, beside a queue with several."""
        if not prefill:
            return False
        queue = self._sequences[next(iter(prefill))].queue
        return len(queue) == 1 and any(len(other) > 1 for other in self._queues.values())

    def _backlogged(self) -> dict[TenantQueue, deque[ScheduledSequence]]:
        """Return the queues with prompts to run, and these prompts.

        A queue that had none before starts at the current virtual time. When no queue has any, all tags are
        reset: what ran alone is not charged.
        """
        prompts = {queue: own for queue in self._queues.values() if (own := queue.prompts)}
        if not prompts:
            self._now = max((self._now, *self._ahead.values(), *(f.tag for f in self._queues.values())))
            self._ahead.clear()
        for queue in self._queues.values():
            if queue in prompts and not queue.is_backlogged:
                queue.tag = max(queue.tag, self._now)
            queue.is_backlogged = queue in prompts
        return prompts


def _chunk(sequence: ScheduledSequence, count: int) -> Chunk:
    end = sequence.cached + count
    return Chunk(
        request_id=sequence.request_id,
        start=sequence.cached,
        count=count,
        pages=sequence.pages,
        last=end == sequence.length,
    )
