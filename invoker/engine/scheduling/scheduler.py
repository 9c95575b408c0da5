"""Which tokens run in the next step: a pure scheduler, plain data in and out.

Sequences belong to *flows*. Within a flow they are admitted in the order in which they came; between
flows that have prompts to run, the one of which fewer tokens were run goes first (start-time fair
queueing), so that a newcomer's prompt is not behind the prompts of a flow that sent many. A flow's only
prompt, once begun, is not interrupted by a flow that has several: that one goes on when it is run, and is
owed as much. What a flow ran while no other wanted to is not held against it. What runs decodes in every
step, whoever it belongs to, but for the one step, never two in a row, that is a newcomer's beside a flow
that sent many.

When pages run out, the youngest sequence of a flow gives way: it goes back to the head of its flow's
queue with its tokens so far and is computed again later (preemption by recomputation).

Several plans may be under way, one behind the other, as in a pipeline: a prompt's next chunk can follow at
once, its next token not before the last chunk's came back, and what is under way gives no pages up.
"""

from collections import Counter, deque
from dataclasses import dataclass

from invoker.engine.flows import Flow, Scheduled, next_flow
from invoker.engine.kv_cache import PAGE_TOKENS, pages_for
from invoker.engine.pages import PageAllocator


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """At most `sequences` at once. A step takes one token of each that decodes, and beside these prompts:
    at most `prefill_tokens` if a flow's only sequence is first or the engine was idle and nobody waits
    beside a flow with several, else at most `turn_tokens`. So a step of a flow that sends much is short: a
    newcomer waits until it is over, and so do those that decode, into whose steps a long prompt is spread."""

    sequences: int
    prefill_tokens: int
    turn_tokens: int

    def __post_init__(self) -> None:
        if min(self.sequences, self.prefill_tokens, self.turn_tokens) < 1:
            raise ValueError(f"limits must be at least 1: {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Run tokens `[start, start + count)` of a sequence. `pages` hold its tokens in order.

    With `last` the chunk ends at the sequence's last known token, so its logits give the next one.
    """

    request_id: str
    start: int
    count: int
    pages: tuple[int, ...]
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What one step runs, which pages are handed out for it, and who had to give way. `stalled` if somebody
    waits for room that what is under way should give up: a plan can make it once nothing is."""

    chunks: tuple[Chunk, ...]
    new_pages: tuple[int, ...]
    preempted: tuple[str, ...]
    stalled: bool = False


class Scheduler:
    """Sequences are added, planned, and after each step either advanced by a token or removed."""

    def __init__(self, limits: Limits, allocator: PageAllocator) -> None:
        self._limits = limits
        self._allocator = allocator
        self._sequences: dict[str, Scheduled] = {}
        self._flows: dict[str, Flow] = {}  # those with sequences
        self._ahead: dict[str, int] = {}  # tags of flows that have left while others wanted to go on
        self._now = 0  # the virtual time: the tag of what went first last
        self._paused = False  # nothing decoded in the last step, for a newcomer's sake
        self._running: list[Scheduled] = []  # in order of admission: the first never gives way
        self._arrivals = 0
        self._under_way: deque[tuple[Scheduled, ...]] = deque()  # what each plan runs, the oldest first
        self._turns = 0
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
        """How many sequences have pages."""
        return len(self._running)

    def add(self, request_id: str, length: int, flow: str = "", most: int = 0, kept: int = 0) -> None:
        """Queue a sequence of `length` known tokens, which must be able to fit all pages together. It may
        grow to `most`: room for so many is kept side by side as long as nobody else needs it. The first
        `kept` tokens need not be run if its first chunk begins behind them."""
        assert request_id not in self._sequences, f"{request_id} is there already"
        assert 1 <= length <= self._allocator.total * PAGE_TOKENS, f"{length} tokens can never fit"
        assert 0 <= kept < length, f"of {length} tokens at least one must be run"
        if flow not in self._flows:
            self._flows[flow] = Flow(flow, self._ahead.pop(flow, 0))
        sequence = Scheduled(request_id, self._flows[flow], self._arrivals, length, most, kept)
        self._arrivals += 1
        self._sequences[request_id] = sequence
        sequence.flow.waiting.append(sequence)

    def remove(self, request_id: str) -> None:
        """Forget a sequence, finished or not, and free its pages."""
        sequence = self._sequences.pop(request_id)
        flow = sequence.flow
        if sequence.pages:
            self._running.remove(sequence)
            flow.running.remove(sequence)
        else:
            flow.waiting.remove(sequence)
        self._allocator.release(sequence.pages)
        if not flow:
            del self._flows[flow.name]
            self._ahead[flow.name] = flow.tag

    def held(self, request_id: str) -> tuple[tuple[int, ...], int]:
        """A sequence's pages, and how many tokens' K and V lie there once nothing of it is under way."""
        sequence = self._sequences[request_id]
        return sequence.pages, sequence.cached

    def ran(self) -> None:
        """Record that the oldest plan under way has run: the K and V of its chunks are in the pages. Of one
        that failed they are not, so its sequences must be removed. A plan without chunks is never there."""
        if self._under_way:
            for sequence in self._under_way.popleft():
                sequence.under_way -= 1

    def append_token(self, request_id: str) -> None:
        """Record that a sequence has grown by the token that its last chunk gave."""
        sequence = self._sequences[request_id]
        assert sequence.cached == sequence.length, f"{request_id} is not at its end"
        sequence.length += 1

    def plan(self, most_decodes: int | None = None) -> StepPlan:
        """Choose the next step's chunks, with at most so many that decode: those whose turn is longest ago.
        No chunks if there is nothing to do; such a plan is not under way."""
        self._stalled = False
        new_pages: list[int] = []
        preempted: list[str] = []
        index = 0
        while index < len(self._running):
            sequence = self._running[index]
            new_pages += self._grow(index, preempted)
            index += bool(sequence.pages)  # else it gave way itself, and another stands there now
        prefill = self._share_prefill(new_pages, preempted)
        self._paused = not self._paused and self._serves_newcomer(prefill)
        decoding = [sequence for sequence in self._running if sequence.decodes and not self._paused]
        if most_decodes is not None:
            decoding = sorted(decoding, key=lambda sequence: sequence.turn)[:most_decodes]
        return StepPlan(
            chunks=self._launch({sequence.request_id for sequence in decoding}, prefill),
            new_pages=tuple(new_pages),
            preempted=tuple(preempted),
            stalled=self._stalled,
        )

    def check_integrity(self) -> None:
        """Assert that pages are owned once, and that arrival orders each flow."""
        self._allocator.check_integrity()
        owned = [page for sequence in self._sequences.values() for page in sequence.pages]
        assert len(owned) == len(set(owned)) == self._allocator.used, "a page is shared or leaked"
        for flow in self._flows.values():
            order = [s.arrival for s in (*flow.running, *flow.waiting)]
            assert order == sorted(order), "a younger sequence is ahead of an older one of its flow"
            assert order, f"{flow.name} is empty"
            assert flow.running == [s for s in self._running if s.flow is flow], "the order of admission"
            for sequence in flow.waiting:
                assert not sequence.pages and not sequence.cached, f"{sequence} waits with pages"
        assert sum(map(len, self._flows.values())) == len(self._sequences), "a sequence is lost"
        for sequence in self._running:
            room = len(sequence.pages) * PAGE_TOKENS
            assert sequence.cached <= min(room, sequence.length), f"{sequence} has outgrown its pages"

    def _launch(self, decoding: set[str], prefill: Counter[str]) -> tuple[Chunk, ...]:
        """The chunks of a plan, which is under way from now on."""
        self._turns += 1
        chunks, run = [], []
        for sequence in self._running:
            count = 1 if sequence.request_id in decoding else prefill[sequence.request_id]
            if count:
                chunks.append(_chunk(sequence, count))
                run.append(sequence)
                sequence.cached += count
                sequence.under_way += 1
                sequence.turn = self._turns
        if chunks:
            self._under_way.append(tuple(run))
        return tuple(chunks)

    # Pages.

    def _grow(self, index: int, preempted: list[str]) -> tuple[int, ...]:
        """Give the running sequence at `index` the pages for all of its tokens, from younger ones if
        need be; if there is none it gives way itself. Nothing if it is to wait for what is under way."""
        sequence = self._running[index]
        needed = pages_for(sequence.length) - len(sequence.pages)
        if not needed:
            return ()
        while needed > self._allocator.free:
            victim = self._youngest_from(index)
            if victim.under_way:
                self._stalled = True
                return ()
            self._preempt(victim, preempted)
            if victim is sequence:
                return ()
        new = self._allocator.grow(sequence.pages, needed)
        sequence.pages += new
        return new

    def _youngest_from(self, index: int) -> Scheduled:
        """Of those at `index` and after, the youngest of the flow that holds the most pages. A flow's only
        running sequence gives way only where all are such, and then the one admitted last does."""
        last = {one.flow: one for one in self._running[index:] if len(one.flow.running) > 1}
        if not last:
            return self._running[-1]
        return last[max(last, key=lambda flow: flow.pages)]

    def _preempt(self, sequence: Scheduled, preempted: list[str]) -> None:
        self._running.remove(sequence)
        sequence.flow.running.remove(sequence)
        self._allocator.release(sequence.pages)
        sequence.pages, sequence.cached = (), 0
        sequence.flow.waiting.appendleft(sequence)
        preempted.append(sequence.request_id)

    def _admit(self, sequence: Scheduled, prefill: Counter[str], preempted: list[str]) -> bool:
        """Let the first waiting sequence of its flow in, if there is or can be made room."""
        needed = pages_for(sequence.length)
        if len(self._running) >= self._limits.sequences or needed > self._allocator.free:
            victims = self._too_many(sequence.flow, needed, prefill)
            if not victims:
                return False
            for victim in victims:
                self._preempt(victim, preempted)
        sequence.flow.running.append(sequence.flow.waiting.popleft())
        self._running.append(sequence)
        sequence.pages = self._allocator.allocate(needed, pages_for(sequence.most))
        sequence.cached, sequence.kept = sequence.kept, 0
        return True

    def _too_many(self, flow: Flow, needed: int, prefill: Counter[str]) -> list[Scheduled]:
        """Who gives way so that a flow that runs nothing yet can run a sequence of `needed` pages: the
        youngest of flows that hold more than their share, but no flow's only one. Empty if it is in vain."""
        if flow.running:
            return []
        page_share = self._allocator.total // len(self._flows)
        slot_share = self._limits.sequences // len(self._flows)
        left = {other: list(other.running) for other in self._flows.values()}
        held = {other: other.pages for other in left}
        free, slots = self._allocator.free, self._limits.sequences - len(self._running)
        victims: list[Scheduled] = []
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
        if any(victim.under_way for victim in victims):
            self._stalled = True
            return []
        return victims

    # Prompts.

    def _share_prefill(self, new_pages: list[int], preempted: list[str]) -> Counter[str]:
        """How many tokens of which prompts run in this step; lets waiting sequences in as far as it can."""
        prefill: Counter[str] = Counter()
        limits = self._limits
        admits = not preempted  # whoever gave way must not be let in again by the same step
        queues = self._wanting()
        crowded = len(queues) > 1 and any(len(flow) > 1 for flow in queues)
        left = limits.turn_tokens if self._running or crowded else limits.prefill_tokens
        while left > 0 and queues:
            flow = next_flow(queues)
            sequence = queues[flow].popleft()
            if not queues[flow]:
                del queues[flow]
            if not sequence.pages:
                # Once one found no room nobody else is let in, so that room for it comes about.
                admits = admits and self._admit(sequence, prefill, preempted)
                if not admits:
                    continue
                admits = not preempted
                new_pages += sequence.pages
            alone = len(flow) == 1 and not prefill
            count = min(sequence.missing, limits.prefill_tokens if alone else left)
            prefill[sequence.request_id] = count
            self._now = max(self._now, flow.tag)
            flow.tag += count
            left = 0 if self._serves_newcomer(prefill) else left - count
        return prefill

    def _serves_newcomer(self, prefill: Counter[str]) -> bool:
        """Whether what goes first is a flow's only sequence, beside a flow with several: then it is all."""
        if not prefill:
            return False
        flow = self._sequences[next(iter(prefill))].flow
        return len(flow) == 1 and any(len(other) > 1 for other in self._flows.values())

    def _wanting(self) -> dict[Flow, deque[Scheduled]]:
        """The flows that have prompts to run. One that had none before begins at the present, and when
        none has any all is forgotten: what was run alone is not held against anybody."""
        queues = {flow: prompts for flow in self._flows.values() if (prompts := flow.prompts)}
        if not queues:
            self._now = max((self._now, *self._ahead.values(), *(f.tag for f in self._flows.values())))
            self._ahead.clear()
        for flow in self._flows.values():
            if flow in queues and not flow.wanting:
                flow.tag = max(flow.tag, self._now)
            flow.wanting = flow in queues
        return queues


def _chunk(sequence: Scheduled, count: int) -> Chunk:
    end = sequence.cached + count
    return Chunk(
        request_id=sequence.request_id,
        start=sequence.cached,
        count=count,
        pages=sequence.pages,
        last=end == sequence.length,
    )
