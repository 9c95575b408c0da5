"""The flows of a scheduler, and which of them goes first: see scheduler.py."""

from collections import deque
from dataclasses import dataclass

from invoker.engine.kv_cache import PAGE_TOKENS


class Flow:
    """One flow's sequences; `tag` is the virtual time, in tokens, at which its next prompt starts."""

    __slots__ = ("name", "running", "tag", "waiting", "wanting")

    def __init__(self, name: str, tag: int) -> None:
        self.name = name
        self.tag = tag
        self.wanting = False  # it had prompts to run in the last plan
        self.running: list[Scheduled] = []  # in order of arrival, and before all of `waiting`
        self.waiting: deque[Scheduled] = deque()

    def __len__(self) -> int:
        return len(self.running) + len(self.waiting)

    @property
    def pages(self) -> int:
        return sum(len(sequence.pages) for sequence in self.running)

    @property
    def prompts(self) -> "deque[Scheduled]":
        """What it has to prefill, in order."""
        return deque([*[one for one in self.running if one.missing > 1], *self.waiting])


@dataclass(slots=True, eq=False)
class Scheduled:
    """A sequence as its scheduler sees it."""

    request_id: str
    flow: Flow
    arrival: int
    length: int  # known tokens
    most: int  # tokens that it may grow to, as far as is known
    kept: int = 0  # tokens whose K and V will lie in pages as soon as it is let in
    cached: int = 0  # tokens whose K and V lie in pages, or will when the plans under way have run
    pages: tuple[int, ...] = ()
    under_way: int = 0  # plans that run it
    turn: int = 0  # the plan that ran it last

    @property
    def missing(self) -> int:
        return self.length - self.cached

    @property
    def decodes(self) -> bool:
        """It wants one more token, and has room for it."""
        return self.missing == 1 and len(self.pages) * PAGE_TOKENS >= self.length


def next_flow(queues: dict[Flow, deque[Scheduled]]) -> Flow:
    """Whose prompt goes on: the flow's that is behind; but a flow's only prompt, once begun, counts as at
    its start beside flows with several."""

    def behind(flow: Flow) -> tuple[int, int, int]:
        return flow.tag, len(flow), queues[flow][0].arrival

    first = min(queues, key=behind)
    if len(first) == 1:
        return first
    begun = [
        flow
        for flow, prompts in queues.items()
        if len(flow) == 1 and prompts[0].cached and flow.tag - prompts[0].cached <= first.tag
    ]
    return min(begun, key=behind, default=first)
