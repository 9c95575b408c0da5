"""Which request goes where while a model spreads: to whoever is done with it first (pure).

A place is a whole instance or a pipeline. Its free capacity is its predicted rate, less what it has to do.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """`rate` is what it serves, in whole nodes or any other unit, `work_tokens` what is left to do there, and
    `room` how many more requests it takes."""

    name: str
    rate: float
    work_tokens: float = 0.0
    room: int = 1 << 30

    def takes_until(self, tokens: float) -> float:
        """When it would be done with so much more."""
        return (self.work_tokens + tokens) / self.rate

    def with_more(self, tokens: float) -> "Place":
        return replace(self, work_tokens=self.work_tokens + tokens, room=self.room - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """A request: `tokens` of prompt and output so far, whose keys and values another place computes anew or
    gets, and about how many are `left` to generate. `begun`: it had a token where it is."""

    request_id: str
    tokens: int
    left: int = 0
    begun: bool = True

    @property
    def work(self) -> int:
        return self.tokens + self.left


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """The request goes on at `place`; "": nobody can take it now, so it is held."""

    request_id: str
    place: str


def choose_place(places: Iterable[Place], tokens: float) -> Place | None:
    """Where a request of so many tokens ends first; of equals at the fastest. None where there is no room."""
    able = [place for place in places if place.rate > 0 and place.room > 0]
    return min(able, key=lambda p: (p.takes_until(tokens), -p.rate, p.name), default=None)


def spread(requests: Iterable[Unfinished], places: Iterable[Place]) -> tuple[Move, ...]:
    """All requests to the places, the longest first, so that all places end at about the same time."""
    left = {place.name: place for place in places}
    moves = []
    for request in sorted(requests, key=lambda r: (-r.work, r.request_id)):
        place = choose_place(left.values(), request.work)
        moves.append(Move(request_id=request.request_id, place="" if place is None else place.name))
        if place is not None:
            left[place.name] = place.with_more(request.work)
    return tuple(moves)


def share_of(requests: Sequence[Unfinished], sharers: int, room: int = 1 << 30) -> tuple[Unfinished, ...]:
    """What a node that switches takes of its pipeline: one in `sharers`, by work; the others stay.

    When all members have switched one after the other, each has taken about as much. As many of those that
    wait there for their first token go first, the newest before others: nothing has to be computed again.
    """
    taker = Place(name="taker", rate=1.0, room=room)
    others = [Place(name=f"other-{number}", rate=1.0) for number in range(sharers - 1)]
    taken = {move.request_id for move in spread(requests, [*others, taker]) if move.place == taker.name}
    waiting = [request for request in reversed(requests) if not request.begun][: len(taken)]
    begun = [request for request in requests if request.begun]
    begun.sort(key=lambda request: request.request_id not in taken)
    chosen = {request.request_id for request in (*waiting, *begun[: len(taken) - len(waiting)])}
    return tuple(request for request in requests if request.request_id in chosen)
