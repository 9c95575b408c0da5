"""Which server takes a call: of instances the least loaded, within each one's own limit; where pipelines are
among them, the one that is done with it first. Pure."""

import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gateway.live_spread import Place, choose_place
from gateway.servers import PipelineServer, Server, rates_of, slots_key

# Calls a stage of a pipeline that wait for their first token; and as many an instance beside pipelines.
_AHEAD = 2
DEFAULT_CONCURRENCY = 8  # of a server that does not tell its limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The server that takes the call, or None; `next_at` is when a refusing one may be asked again."""

    instance: Server | None
    next_at: float | None = None


def slots_of(server: Server) -> int:
    """How many calls it takes at once."""
    return server.max_concurrency or DEFAULT_CONCURRENCY


def spare_of(slots: int) -> int:
    """How many more it takes for tenants that have less than their share: they need not wait until a call
    of the others ends, and the others get no slot until all is within the limit again."""
    return slots // 2


class Slots:
    """This gateway's calls in flight, by `slots_key`, and servers that said they have no room.

    `work` is roughly what the calls on each take, in tokens.
    """

    def __init__(self) -> None:
        self._in_flight: Counter[str] = Counter()
        self._work: Counter[str] = Counter()
        self._fresh: Counter[str] = Counter()  # calls that wait there for their first token
        self._full_until: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<Slots {dict(self._in_flight)}>"

    @property
    def in_flight(self) -> Counter[str]:
        return self._in_flight

    def take(self, key: str, cost: int = 1) -> None:
        self._in_flight[key] += 1
        self._work[key] += cost
        self._fresh[key] += 1

    def begun(self, key: str) -> None:
        """One of its calls had its first token."""
        self._fresh[key] -= 1

    def free(self, key: str, cost: int = 1, *, begun: bool = False) -> None:
        """A call has left, which had `begun` or not."""
        assert self._in_flight[key] > 0, key
        self._in_flight[key] -= 1
        self._work[key] -= cost
        self._fresh[key] -= not begun
        if not self._in_flight[key]:
            del self._in_flight[key], self._work[key], self._fresh[key]

    def refuse_until(self, instance_id: str, until: float) -> None:
        """The server is full with other gateways' calls: leave it alone until then."""
        self._full_until[instance_id] = until

    def room(self, server: Server, *, owed: bool = False) -> int:
        """How many more calls it takes. A pipeline gets no more than keep it busy before these begin: others
        may form, and nodes become whole, any moment."""
        slots = slots_of(server)
        room = slots + (spare_of(slots) if owed else 0) - self._in_flight[slots_key(server)]
        return min(room, self._ahead(server)) if _runs_in_turns(server) else room

    def _ahead(self, server: Server) -> int:
        """How many more it takes that keep it busy until those that wait there begin."""
        stages = len(server.pipeline.stages) if isinstance(server, PipelineServer) else 1
        return _AHEAD * stages - self._fresh[slots_key(server)]

    def _keeps_up(self, server: Server) -> bool:
        return isinstance(server, PipelineServer) or self._ahead(server) > 0

    def choose(
        self, ready: Iterable[Server], rng: random.Random, now: float, *, owed: bool = False, cost: int = 1
    ) -> Choice:
        """A server with a free slot; a call that is `owed` one gets it even where all are taken, within
        reason. `cost` is what the call takes, in tokens; ties by `rng`.

        While there are pipelines an instance, too, gets no more than keep it busy: it takes the prompts in
        its slots one after the other, and would be done with the last of them long after a pipeline, or a
        node that has become whole meanwhile.
        """
        ready = list(ready)
        beside_pipelines = any(map(_runs_in_turns, ready))
        if self._full_until:
            self._full_until = {id_: until for id_, until in self._full_until.items() if until > now}
        able: list[Server] = []
        next_at = None
        for server in ready:
            until = self._full_until.get(server.instance_id)
            if until is not None:
                next_at = until if next_at is None else min(next_at, until)
            elif self.room(server, owed=owed) > 0 and (not beside_pipelines or self._keeps_up(server)):
                able.append(server)
        if any(isinstance(server, PipelineServer) for server in able):
            return Choice(instance=self._soonest(able, cost), next_at=next_at)
        return Choice(instance=self._least_loaded(able, rng), next_at=next_at)

    def _least_loaded(self, able: Sequence[Server], rng: random.Random) -> Server | None:
        best: list[Server] = []
        best_load = math.inf
        for server in able:
            load = self._in_flight[slots_key(server)] / slots_of(server)
            if load < best_load:
                best, best_load = [server], load
            elif load == best_load:
                best.append(server)
        return rng.choice(best) if best else None

    def _soonest(self, able: Sequence[Server], cost: int) -> Server | None:
        by_id = {server.instance_id: server for server in able}
        places = [
            Place(name=server.instance_id, rate=rate, work_tokens=self._work[slots_key(server)])
            for server, rate in zip(able, rates_of(able), strict=True)
        ]
        chosen = choose_place(places, cost)
        return None if chosen is None else by_id[chosen.name]


def _runs_in_turns(server: Server) -> bool:
    return isinstance(server, PipelineServer) and server.runs_in_turns
