"""Shortest-completion-time routing while a model spreads (pure).

A target is a ready instance or a pipeline, with a predicted rate and a backlog of work.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTarget:
    """A target of requests: `rate` in whole nodes or any other unit, and its backlog `work_tokens`.

    `room` is the number of its free slots.
    """

    name: str
    rate: float
    work_tokens: float = 0.0
    room: int = 1 << 30

    def takes_until(self, tokens: float) -> float:
        """Return when it would end a request of that size."""
        return (self.work_tokens + tokens) / self.rate

    def with_more(self, tokens: float) -> "RequestTarget":
        return replace(self, work_tokens=self.work_tokens + tokens, room=self.room - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedRequest:
    """A running request: `tokens` of prompt and output so far, and the estimated number `left` to generate.

    Another target recomputes or fetches the KV cache of `tokens`. `has_token`: it has one from its target.
    """

    request_id: str
    tokens: int
    left: int = 0
    has_token: bool = True

    @property
    def work(self) -> int:
        return self.tokens + self.left


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMove:
    """The request continues at `target`; "": none has room, so it is queued."""

    request_id: str
    target: str


def choose_target(targets: Iterable[RequestTarget], tokens: float) -> RequestTarget | None:
    """Return the target that ends the request first, of equals the fastest; None without room."""
    able = [target for target in targets if target.rate > 0 and target.room > 0]
    return min(able, key=lambda p: (p.takes_until(tokens), -p.rate, p.name), default=None)


def spread(
    requests: Iterable[UnfinishedRequest], targets: Iterable[RequestTarget]
) -> tuple[RequestMove, ...]:
    """Distribute requests, the longest first, so that all targets end at about the same time."""
    left = {target.name: target for target in targets}
    moves = []
    for request in sorted(requests, key=lambda r: (-r.work, r.request_id)):
        target = choose_target(left.values(), request.work)
        moves.append(RequestMove(request_id=request.request_id, target="" if target is None else target.name))
        if target is not None:
            left[target.name] = target.with_more(request.work)
    return tuple(moves)


def share_of(
    requests: Sequence[UnfinishedRequest], sharers: int, room: int = 1 << 30
) -> tuple[UnfinishedRequest, ...]:
    """Return the requests that a promoted node takes from its pipeline: one in `sharers`, by work.

    When all members have been promoted in turn, each has taken about as much. Requests without a first token
    go first, the newest of them before others: nothing has to be recomputed.
    """
    taker = RequestTarget(name="taker", rate=1.0, room=room)
    others = [RequestTarget(name=f"other-{number}", rate=1.0) for number in range(sharers - 1)]
    taken = {move.request_id for move in spread(requests, [*others, taker]) if move.target == taker.name}
    waiting = [request for request in reversed(requests) if not request.has_token][: len(taken)]
    has_token = [request for request in requests if request.has_token]
    has_token.sort(key=lambda request: request.request_id not in taken)
    chosen = {request.request_id for request in (*waiting, *has_token[: len(taken) - len(waiting)])}
    return tuple(request for request in requests if request.request_id in chosen)
