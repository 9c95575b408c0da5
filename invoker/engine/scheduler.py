"""Which tokens run in the next step: a pure scheduler, plain data in and out.

First come, first served: sequences are admitted in the order in which they came, and when pages run
out the youngest gives way. It goes back to the head of the queue with its tokens so far and is
computed again later (preemption by recomputation).
"""

from collections import deque
from dataclasses import dataclass

from invoker.engine.kv_cache import PAGE_TOKENS, pages_for
from invoker.engine.pages import PageAllocator


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """At most `sequences` at once; a step takes one token of each that decodes, and beside these at
    most `prefill_tokens` of prompts."""

    sequences: int
    prefill_tokens: int

    def __post_init__(self) -> None:
        if self.sequences < 1 or self.prefill_tokens < 1:
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
    """What one step runs, which pages are handed out for it, and who had to give way."""

    chunks: tuple[Chunk, ...]
    new_pages: tuple[int, ...]
    preempted: tuple[str, ...]


@dataclass(slots=True)
class _Sequence:
    request_id: str
    arrival: int
    length: int  # known tokens
    cached: int = 0  # tokens whose K and V lie in pages
    pages: tuple[int, ...] = ()


class Scheduler:
    """Sequences are added, planned, and after each step either advanced by a token or removed."""

    def __init__(self, limits: Limits, allocator: PageAllocator) -> None:
        self._limits = limits
        self._allocator = allocator
        self._sequences: dict[str, _Sequence] = {}
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []  # in order of arrival
        self._arrivals = 0
        self._planned: dict[str, int] = {}  # tokens of the plan that is being run

    def __repr__(self) -> str:
        return f"<Scheduler {len(self._running)} running, {len(self._waiting)} waiting, {self._allocator!r}>"

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def add(self, request_id: str, length: int) -> None:
        """Queue a sequence of `length` known tokens, which must be able to fit all pages together."""
        assert request_id not in self._sequences, f"{request_id} is there already"
        assert 1 <= length <= self._allocator.total * PAGE_TOKENS, f"{length} tokens can never fit"
        sequence = _Sequence(request_id, self._arrivals, length)
        self._arrivals += 1
        self._sequences[request_id] = sequence
        self._waiting.append(sequence)

    def remove(self, request_id: str) -> None:
        """Forget a sequence, finished or not, and free its pages."""
        sequence = self._sequences.pop(request_id)
        if sequence.pages:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        self._allocator.release(sequence.pages)
        self._planned.pop(request_id, None)

    def ran(self) -> None:
        """Record that the planned chunks have run: their K and V are in the pages."""
        for request_id, count in self._planned.items():
            self._sequences[request_id].cached += count
        self._planned = {}

    def append_token(self, request_id: str) -> None:
        """Record that a sequence has grown by the token that its last chunk gave."""
        sequence = self._sequences[request_id]
        assert sequence.cached == sequence.length, f"{request_id} is not at its end"
        sequence.length += 1

    def plan(self) -> StepPlan:
        """Choose the next step's chunks; no chunks if there is nothing to do."""
        assert not self._planned, "the last plan has not been run"
        chunks: list[Chunk] = []
        new_pages: list[int] = []
        preempted: list[str] = []
        prefill_left = self._limits.prefill_tokens

        index = 0
        while index < len(self._running):
            sequence = self._running[index]
            grown = self._grow(sequence, preempted)
            if grown is None:  # it was itself the youngest, hence the last
                break
            new_pages += grown
            missing = sequence.length - sequence.cached
            count = 1 if missing == 1 else min(missing, prefill_left)
            if missing > 1:
                prefill_left -= count
            if count:
                chunks.append(self._chunk(sequence, count))
            index += 1

        # Whoever gave way must not be let in again by the same step.
        while not preempted and self._waiting and prefill_left > 0:
            sequence = self._waiting[0]
            needed = pages_for(sequence.length)
            if len(self._running) >= self._limits.sequences or needed > self._allocator.free:
                break
            self._waiting.popleft()
            self._running.append(sequence)
            sequence.pages = self._allocator.allocate(needed)
            new_pages += sequence.pages
            count = min(sequence.length, prefill_left)
            prefill_left -= count
            chunks.append(self._chunk(sequence, count))

        self._planned = {chunk.request_id: chunk.count for chunk in chunks}
        return StepPlan(chunks=tuple(chunks), new_pages=tuple(new_pages), preempted=tuple(preempted))

    def check_integrity(self) -> None:
        """Assert that pages are owned once, and that arrival orders all queues."""
        self._allocator.check_integrity()
        owned = [page for sequence in self._sequences.values() for page in sequence.pages]
        assert len(owned) == len(set(owned)) == self._allocator.used, "a page is shared or leaked"
        order = [s.arrival for s in (*self._running, *self._waiting)]
        assert order == sorted(order), "a younger sequence is ahead of an older one"
        assert len(order) == len(self._sequences), "a sequence is lost"
        for sequence in self._running:
            room = len(sequence.pages) * PAGE_TOKENS
            assert sequence.cached <= min(room, sequence.length), f"{sequence} has outgrown its pages"
        for sequence in self._waiting:
            assert not sequence.pages and not sequence.cached, f"{sequence} waits with pages"

    def _grow(self, sequence: _Sequence, preempted: list[str]) -> tuple[int, ...] | None:
        """Give `sequence` the pages for all of its tokens, from the youngest if need be."""
        needed = pages_for(sequence.length) - len(sequence.pages)
        while needed > self._allocator.free:
            youngest = self._running.pop()
            self._allocator.release(youngest.pages)
            youngest.pages, youngest.cached = (), 0
            self._waiting.appendleft(youngest)
            preempted.append(youngest.request_id)
            if youngest is sequence:
                return None
        new = self._allocator.allocate(needed)
        sequence.pages += new
        return new

    def _chunk(self, sequence: _Sequence, count: int) -> Chunk:
        end = sequence.cached + count
        return Chunk(
            request_id=sequence.request_id,
            start=sequence.cached,
            count=count,
            pages=sequence.pages,
            last=end == sequence.length,
        )
