"""Fair queueing between tenants: whose turn it is, and who has too much. Pure; every operation takes
O(log tenants) or less, however much waits."""

import heapq
from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator
from operator import attrgetter
from typing import Generic, Protocol, TypeVar


class Waiting(Protocol):
    """What may wait in a FairLine. `arrival` is unique and grows; `cost` is roughly what it will take."""

    @property
    def tenant(self) -> str: ...

    @property
    def arrival(self) -> int: ...

    @property
    def cost(self) -> int: ...


T = TypeVar("T", bound=Waiting)
_BY_ARRIVAL = attrgetter("arrival")
_SOME = 64  # stale entries that are not worth the search for them


class _Flow(Generic[T]):
    """One tenant in a line: what waits, and how much is being served. `tag` is the virtual time at which
    its next item starts; `entry` stamps its place in the heap."""

    __slots__ = ("active", "entry", "fresh", "returned", "tag", "tenant")

    def __init__(self, tenant: str, tag: int) -> None:
        self.tenant = tenant
        self.tag = tag
        self.active = 0
        self.entry = 0
        self.returned: list[T] = []  # taken before and put back, hence older than all of `fresh`
        self.fresh: OrderedDict[int, T] = OrderedDict()

    @property
    def waits(self) -> bool:
        return bool(self.returned or self.fresh)

    @property
    def first(self) -> T:
        return self.returned[0] if self.returned else next(iter(self.fresh.values()))


class FairLine(Generic[T]):
    """What waits for slots, tenant by tenant: the tenant with the fewest items in service is next, of
    equals the one whose earlier items cost less (start-time fair queueing). Within a tenant: by arrival.

    So that slots are shared evenly among those who want them, a tenant that wants few gets them as soon
    as one is free, and none saves up turns while it wants nothing.
    """

    def __init__(self) -> None:
        self._flows: dict[str, _Flow[T]] = {}  # those with anything here
        self._heap: list[tuple[int, int, int, _Flow[T]]] = []  # (active, tag, entry, flow); stale ones too
        self._entries = 0
        self._now = 0  # the virtual time: the tag of what was taken last
        self._ahead: dict[str, int] = {}  # tags of tenants that have left, where later than that
        self._most_ahead = _SOME  # of them before those that have passed are looked for
        self._waiting = 0
        self._active = 0

    def __repr__(self) -> str:
        return f"<FairLine waiting={self._waiting} active={self._active} tenants={len(self._flows)}>"

    def __len__(self) -> int:
        """How many wait."""
        return self._waiting

    def __iter__(self) -> Iterator[T]:
        """What waits, tenant by tenant, each in order of arrival."""
        for flow in list(self._flows.values()):
            yield from list(flow.returned)
            yield from list(flow.fresh.values())

    @property
    def active(self) -> int:
        """How many are in service."""
        return self._active

    @property
    def tenants(self) -> int:
        """How many have anything waiting or in service."""
        return len(self._flows)

    def is_owed(self, tenant: str, slots: int) -> bool:
        """Whether a tenant is served less than its share of `slots`, as others are there too. One that is
        served nothing is owed a slot, however small its share."""
        flow = self._flows.get(tenant)
        active = 0 if flow is None else flow.active
        return len(self._flows) > 1 and (not active or (active + 1) * len(self._flows) <= slots)

    def first(self) -> T | None:
        """Whose turn it is, without taking it."""
        while self._heap:
            *_, entry, flow = self._heap[0]
            if flow.entry == entry:
                return flow.first
            heapq.heappop(self._heap)
        return None

    def add(self, item: T) -> None:
        """Let a new item wait, after all others of its tenant."""
        flow = self._flow(item.tenant)
        waited = flow.waits
        flow.fresh[item.arrival] = item
        self._waiting += 1
        if not waited:
            flow.tag = max(flow.tag, self._now)
            self._place(flow)

    def take(self, item: T) -> None:
        """Move a waiting item into service."""
        flow = self._flows[item.tenant]
        self._unwait(flow, item)
        self._now = max(self._now, flow.tag)
        flow.tag += max(1, item.cost)
        flow.active += 1
        self._active += 1
        self._place(flow)

    def put_back(self, item: T) -> None:
        """Let an item in service wait again, in its place by arrival."""
        flow = self._flows[item.tenant]
        self._stop(flow)
        insort(flow.returned, item, key=_BY_ARRIVAL)
        flow.tag -= max(1, item.cost)  # it is not to pay twice
        self._waiting += 1
        self._place(flow)

    def finish(self, tenant: str) -> None:
        """An item of the tenant that was in service is over."""
        flow = self._flows[tenant]
        self._stop(flow)
        self._place(flow)

    def remove(self, item: T) -> bool:
        """Take an item away that waits; says whether it did."""
        flow = self._flows.get(item.tenant)
        if flow is None or not self._unwait(flow, item):
            return False
        self._place(flow)
        return True

    def newest(self, tenant: str) -> T | None:
        """The tenant's item that came last, of those that were never taken."""
        flow = self._flows.get(tenant)
        return None if flow is None or not flow.fresh else next(reversed(flow.fresh.values()))

    def check_integrity(self) -> None:
        """Assert that all counts agree, and that each tenant that waits has its one place."""
        flows = self._flows.values()
        assert self._waiting == sum(len(f.returned) + len(f.fresh) for f in flows)
        assert self._active == sum(f.active for f in flows)
        placed = [flow.tenant for *_, entry, flow in self._heap if flow.entry == entry]
        assert sorted(placed) == sorted(f.tenant for f in flows if f.waits), "a tenant has no place, or two"
        for flow in flows:
            assert flow.waits or flow.active, f"{flow.tenant} has nothing here"
            arrivals = [item.arrival for item in (*flow.returned, *flow.fresh.values())]
            assert arrivals == sorted(arrivals), f"{flow.tenant} is out of order"
        assert len(self._heap) <= 2 * len(self._flows) + _SOME

    def _flow(self, tenant: str) -> _Flow[T]:
        flow = self._flows.get(tenant)
        if flow is None:
            tag = max(self._now, self._ahead.pop(tenant, 0))
            flow = self._flows[tenant] = _Flow(tenant, tag)
        return flow

    def _stop(self, flow: _Flow[T]) -> None:
        assert flow.active > 0, flow.tenant
        flow.active -= 1
        self._active -= 1

    def _unwait(self, flow: _Flow[T], item: T) -> bool:
        if item.arrival in flow.fresh:
            del flow.fresh[item.arrival]
        elif item in flow.returned:
            flow.returned.remove(item)
        else:
            return False
        self._waiting -= 1
        return True

    def _place(self, flow: _Flow[T]) -> None:
        """Give the flow its place anew, or none if nothing of it waits."""
        self._entries += 1
        flow.entry = self._entries
        if flow.waits:
            heapq.heappush(self._heap, (flow.active, flow.tag, flow.entry, flow))
        elif not flow.active:
            self._forget(flow)
        if len(self._heap) > 2 * len(self._flows) + _SOME:
            self._heap = [place for place in self._heap if place[3].entry == place[2]]
            heapq.heapify(self._heap)

    def _forget(self, flow: _Flow[T]) -> None:
        del self._flows[flow.tenant]
        if not self._flows:
            self._ahead.clear()
            self._now = 0
        elif flow.tag > self._now:
            self._ahead[flow.tenant] = flow.tag
            if len(self._ahead) > self._most_ahead:
                self._ahead = {name: tag for name, tag in self._ahead.items() if tag > self._now}
                self._most_ahead = 2 * len(self._ahead) + _SOME


class Tally:
    """Counts by name, and which name has most; each operation takes constant time."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._names: dict[int, dict[str, None]] = {}  # by count
        self._most = 0
        self.total = 0

    def __repr__(self) -> str:
        return f"<Tally total={self.total} names={len(self._counts)} most={self._most}>"

    def __getitem__(self, name: str) -> int:
        return self._counts.get(name, 0)

    def __len__(self) -> int:
        return len(self._counts)

    @property
    def most(self) -> int:
        return self._most

    @property
    def richest(self) -> str | None:
        """A name with the highest count; None if nothing is counted."""
        return next(iter(self._names[self._most])) if self._most else None

    def add(self, name: str) -> None:
        self._move(name, self[name] + 1)
        self.total += 1

    def drop(self, name: str) -> None:
        assert self[name] > 0, name
        self._move(name, self[name] - 1)
        self.total -= 1

    def _move(self, name: str, count: int) -> None:
        if before := self._counts.pop(name, 0):
            names = self._names[before]
            del names[name]
            if not names:
                del self._names[before]
        if count:
            self._counts[name] = count
            self._names.setdefault(count, {})[name] = None
        # Counts change by one, so that the most does.
        self._most = count if count > self._most or self._most not in self._names else self._most
