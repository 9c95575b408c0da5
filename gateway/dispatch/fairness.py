"""Start-time fair queueing between tenants (pure).

Every operation takes O(log tenants) or less, whatever the queue length.
"""

import heapq
from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator
from operator import attrgetter
from typing import Generic, Protocol, TypeVar


class Queueable(Protocol):
    """An item of a WeightedFairQueue: `arrival` is unique and ascending, `cost` its estimated cost."""

    @property
    def tenant(self) -> str: ...

    @property
    def arrival(self) -> int: ...

    @property
    def cost(self) -> int: ...


T = TypeVar("T", bound=Queueable)
_BY_ARRIVAL = attrgetter("arrival")
_MIN_STALE = 64  # stale entries that are not worth removing


class _TenantQueue(Generic[T]):
    """The queue of one tenant, and its number of items in service.

    `tag` is the virtual start time of its next item; `entry` identifies its current heap entry.
    """

    __slots__ = ("active", "entry", "fresh", "returned", "tag", "tenant")

    def __init__(self, tenant: str, tag: int) -> None:
        self.tenant = tenant
        self.tag = tag
        self.active = 0
        self.entry = 0
        self.returned: list[T] = []  # requeued, hence older than all of `fresh`
        self.fresh: OrderedDict[int, T] = OrderedDict()

    @property
    def waits(self) -> bool:
        return bool(self.returned or self.fresh)

    @property
    def first(self) -> T:
        return self.returned[0] if self.returned else next(iter(self.fresh.values()))


class WeightedFairQueue(Generic[T]):
    """A weighted fair queue of items that wait for slots.

    Next is the tenant with the fewest items in service, among equals the one with the lowest virtual start
    time (start-time fair queueing, Goyal et al. 1996). Within a tenant: by arrival. Backlogged tenants so
    share the slots evenly, and an idle tenant earns no credit.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, _TenantQueue[T]] = {}  # tenants with waiting or active items
        # (active, tag, entry, queue), stale entries included
        self._heap: list[tuple[int, int, int, _TenantQueue[T]]] = []
        self._entries = 0
        self._now = 0  # the virtual time: the tag of the item started last
        self._ahead: dict[str, int] = {}  # tags of idle tenants, where later than the virtual time
        self._max_ahead = _MIN_STALE  # size above which passed tags are removed
        self._waiting = 0
        self.active = 0  # items in service

    def __repr__(self) -> str:
        return (
            f"<WeightedFairQueue waiting={self._waiting} active={self.active} tenants={len(self._tenants)}>"
        )

    def __len__(self) -> int:
        """Return the number of waiting items."""
        return self._waiting

    def __iter__(self) -> Iterator[T]:
        """Yield the waiting items, tenant by tenant, each in order of arrival."""
        for queue in list(self._tenants.values()):
            yield from list(queue.returned)
            yield from list(queue.fresh.values())

    @property
    def tenants(self) -> int:
        """The number of tenants with items waiting or in service."""
        return len(self._tenants)

    def is_below_share(self, tenant: str, slots: int) -> bool:
        """Return whether a tenant among several has less than its fair share of `slots` in service.

        A tenant with none in service always has.
        """
        queue = self._tenants.get(tenant)
        active = 0 if queue is None else queue.active
        return len(self._tenants) > 1 and (not active or (active + 1) * len(self._tenants) <= slots)

    def first(self) -> T | None:
        """Return the next item without starting it; None if nothing waits."""
        while self._heap:
            *_, entry, queue = self._heap[0]
            if queue.entry == entry:
                return queue.first
            heapq.heappop(self._heap)
        return None

    def add(self, item: T) -> None:
        """Add a new item behind all others of its tenant."""
        queue = self._tenant_queue(item.tenant)
        waited = queue.waits
        queue.fresh[item.arrival] = item
        self._added(queue, waited=waited)

    def start(self, item: T) -> None:
        """Move a waiting item into service."""
        queue = self._tenants[item.tenant]
        self._unwait(queue, item)
        self._now = max(self._now, queue.tag)
        queue.tag += max(1, item.cost)
        queue.active += 1
        self.active += 1
        self._place(queue)

    def serve(self, item: T) -> None:
        """Start a new item at once, of a tenant of which nothing waits."""
        queue = self._tenants.get(item.tenant) or self._tenant_queue(item.tenant)
        assert not (queue.returned or queue.fresh), item.tenant
        self._now = queue.tag = max(queue.tag, self._now)
        queue.tag += max(1, item.cost)
        queue.active += 1
        self.active += 1

    def put_back(self, item: T) -> None:
        """Add an item that was in service in another queue, in order of arrival."""
        queue = self._tenant_queue(item.tenant)
        waited = queue.waits
        insort(queue.returned, item, key=_BY_ARRIVAL)
        self._added(queue, waited=waited)

    def requeue(self, item: T) -> None:
        """Move an item in service back into the queue, in order of arrival."""
        queue = self._tenants[item.tenant]
        queue.active -= 1
        self.active -= 1
        insort(queue.returned, item, key=_BY_ARRIVAL)
        queue.tag -= max(1, item.cost)  # its cost is charged when it starts again
        self._waiting += 1
        self._place(queue)

    def finish(self, tenant: str) -> None:
        """Record that an item of the tenant in service has ended."""
        queue = self._tenants[tenant]
        assert queue.active > 0, tenant
        queue.active -= 1
        self.active -= 1
        if queue.returned or queue.fresh:
            self._place(queue)
        elif not queue.active:
            self._forget(queue)

    def remove(self, item: T) -> bool:
        """Remove a waiting item; return whether it was there."""
        queue = self._tenants.get(item.tenant)
        if queue is None or not self._unwait(queue, item):
            return False
        self._place(queue)
        return True

    def newest(self, tenant: str) -> T | None:
        """Return the tenant's latest item that was never started; None without one."""
        queue = self._tenants.get(tenant)
        return None if queue is None or not queue.fresh else next(reversed(queue.fresh.values()))

    def check_integrity(self) -> None:
        """Assert that all counts agree and that each backlogged tenant has exactly one heap entry."""
        queues = self._tenants.values()
        assert self._waiting == sum(len(f.returned) + len(f.fresh) for f in queues)
        assert self.active == sum(f.active for f in queues)
        placed = [queue.tenant for *_, entry, queue in self._heap if queue.entry == entry]
        assert sorted(placed) == sorted(f.tenant for f in queues if f.waits), (
            "a tenant has no heap entry, or two"
        )
        for queue in queues:
            assert queue.waits or queue.active, f"{queue.tenant} has no items"
            arrivals = [item.arrival for item in (*queue.returned, *queue.fresh.values())]
            assert arrivals == sorted(arrivals), f"{queue.tenant} is out of order"
        assert len(self._heap) <= 2 * len(self._tenants) + _MIN_STALE

    def _added(self, queue: _TenantQueue[T], *, waited: bool) -> None:
        """Count a new item of a tenant, of which others `waited` or not."""
        self._waiting += 1
        if not waited:
            queue.tag = max(queue.tag, self._now)
            self._place(queue)

    def _tenant_queue(self, tenant: str) -> _TenantQueue[T]:
        queue = self._tenants.get(tenant)
        if queue is None:
            tag = max(self._now, self._ahead.pop(tenant, 0))
            queue = self._tenants[tenant] = _TenantQueue(tenant, tag)
        return queue

    def _unwait(self, queue: _TenantQueue[T], item: T) -> bool:
        if item.arrival in queue.fresh:
            del queue.fresh[item.arrival]
        elif item in queue.returned:
            queue.returned.remove(item)
        else:
            return False
        self._waiting -= 1
        return True

    def _place(self, queue: _TenantQueue[T]) -> None:
        """Replace the tenant's heap entry, or remove it if nothing of it waits."""
        self._entries += 1
        queue.entry = self._entries
        if queue.waits:
            heapq.heappush(self._heap, (queue.active, queue.tag, queue.entry, queue))
        elif not queue.active:
            self._forget(queue)
        if len(self._heap) > 2 * len(self._tenants) + _MIN_STALE:
            self._heap = [place for place in self._heap if place[3].entry == place[2]]
            heapq.heapify(self._heap)

    def _forget(self, queue: _TenantQueue[T]) -> None:
        del self._tenants[queue.tenant]
        if not self._tenants:
            self._ahead.clear()
            self._now = 0
        elif queue.tag > self._now:
            self._ahead[queue.tenant] = queue.tag
            if len(self._ahead) > self._max_ahead:
                self._ahead = {name: tag for name, tag in self._ahead.items() if tag > self._now}
                self._max_ahead = 2 * len(self._ahead) + _MIN_STALE


class TenantCounts:
    """Counts by tenant with the maximum; each operation takes constant time."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._names: dict[int, dict[str, None]] = {}  # by count
        self._most = 0
        self.total = 0

    def __repr__(self) -> str:
        return f"<TenantCounts total={self.total} names={len(self._counts)} most={self._most}>"

    def __getitem__(self, name: str) -> int:
        return self._counts.get(name, 0)

    def __len__(self) -> int:
        return len(self._counts)

    @property
    def most(self) -> int:
        return self._most

    @property
    def largest(self) -> str | None:
        """A tenant with the highest count; None if nothing is counted."""
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
        # Counts change by one, so the maximum does, too.
        self._most = count if count > self._most or self._most not in self._names else self._most
