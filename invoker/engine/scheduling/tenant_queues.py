"""The tenant queues of a scheduler, and the order in which they are served: see scheduler.py."""

from collections import deque
from dataclasses import dataclass

from invoker.engine.kv.cache import PAGE_TOKENS


class TenantQueue:
    """One tenant's sequences; `tag` is the virtual time, in tokens, at which its next prompt starts."""

    __slots__ = ("is_backlogged", "name", "running", "tag", "waiting")

    def __init__(self, name: str, tag: int) -> None:
        self.name = name
        self.tag = tag
        self.is_backlogged = False  # it had prompts to run in the last plan
        self.running: list[ScheduledSequence] = []  # in order of arrival, and before all of `waiting`
        self.waiting: deque[ScheduledSequence] = deque()

    def __len__(self) -> int:
        return len(self.running) + len(self.waiting)

    @property
    def pages(self) -> int:
        return sum(len(sequence.pages) for sequence in self.running)

    @property
    def prompts(self) -> "deque[ScheduledSequence]":
        """The sequences to prefill, in order."""
        return deque([*[one for one in self.running if one.uncached > 1], *self.waiting])


@dataclass(slots=True, eq=False)
class ScheduledSequence:
    """The scheduler's state of a sequence."""

    request_id: str
    queue: TenantQueue
    arrival: int
    length: int  # known tokens
    max_tokens: int  # that it may grow to, 0 if unknown
    imported: int = 0  # tokens with K and V in its pages as soon as it is admitted
    cached: int = 0  # tokens with K and V in its pages once the plans in flight have run
    pages: tuple[int, ...] = ()
    in_flight: int = 0  # plans that run it
    last_plan: int = 0  # the number of the last plan that ran it
    share: float = 1.0  # of the layers, that its prompt has left to run

    @property
    def uncached(self) -> int:
        return self.length - self.cached

    @property
    def decodes(self) -> bool:
        """Whether it needs one more token and has the page for it."""
        return self.uncached == 1 and len(self.pages) * PAGE_TOKENS >= self.length


def next_queue(prompts: dict[TenantQueue, deque[ScheduledSequence]]) -> TenantQueue:
    """Return the queue to serve: the one with the smallest tag.

    A queue's only prompt, once started, counts with its tag at its start against queues with several
    sequences.
    """

    def tag(queue: TenantQueue) -> tuple[int, int, int]:
        return queue.tag, len(queue), prompts[queue][0].arrival

    first = min(prompts, key=tag)
    if len(first) == 1:
        return first
    started = [
        queue
        for queue, own in prompts.items()
        if len(queue) == 1 and own[0].cached and queue.tag - own[0].cached <= first.tag
    ]
    return min(started, key=tag, default=first)
