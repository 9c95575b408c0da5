"""Which ready instance takes a call: least loaded, within each instance's own limit. Pure."""

import math
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from registry.instance import InstanceRecord

DEFAULT_CONCURRENCY = 8  # of an instance that does not tell its limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The instance that takes the call, or None; `next_at` is when a refusing one may be asked again."""

    instance: InstanceRecord | None
    next_at: float | None = None


def slots_of(instance: InstanceRecord) -> int:
    """How many calls it takes at once."""
    return instance.max_concurrency or DEFAULT_CONCURRENCY


def spare_of(slots: int) -> int:
    """How many more it takes for tenants that have less than their share: they need not wait until a call
    of the others ends, and the others get no slot until all is within the limit again."""
    return slots // 2


class Slots:
    """This gateway's calls in flight by instance, and instances that said they have no room."""

    def __init__(self) -> None:
        self._in_flight: Counter[str] = Counter()
        self._full_until: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<Slots {dict(self._in_flight)}>"

    @property
    def in_flight(self) -> Counter[str]:
        return self._in_flight

    def take(self, instance_id: str) -> None:
        self._in_flight[instance_id] += 1

    def free(self, instance_id: str) -> None:
        assert self._in_flight[instance_id] > 0, instance_id
        self._in_flight[instance_id] -= 1
        if not self._in_flight[instance_id]:
            del self._in_flight[instance_id]

    def refuse_until(self, instance_id: str, until: float) -> None:
        """The instance is full with other gateways' calls: leave it alone until then."""
        self._full_until[instance_id] = until

    def choose(
        self, ready: Iterable[InstanceRecord], rng: random.Random, now: float, *, owed: bool = False
    ) -> Choice:
        """The least loaded instance with a free slot, ties by `rng`; a call that is `owed` one gets it even
        where all are taken, within reason."""
        if self._full_until:
            self._full_until = {id_: until for id_, until in self._full_until.items() if until > now}
        best: list[InstanceRecord] = []
        best_load, next_at = math.inf, None
        for instance in ready:
            until = self._full_until.get(instance.instance_id)
            if until is not None:
                next_at = until if next_at is None else min(next_at, until)
                continue
            slots, taken = slots_of(instance), self._in_flight[instance.instance_id]
            if taken >= slots + (spare_of(slots) if owed else 0):
                continue
            load = taken / slots
            if load < best_load:
                best, best_load = [instance], load
            elif best and load == best_load:
                best.append(instance)
        return Choice(instance=rng.choice(best) if best else None, next_at=next_at)
