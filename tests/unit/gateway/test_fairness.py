"""Fair queueing: no tenant starves, slots are shared evenly, and a tenant that fills a queue is rejected."""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.cluster.state_cache import VersionKey
from gateway.core.contract import DispatchError
from gateway.dispatch.admission import Admission, AdmissionLimits, QueuedRequest
from gateway.dispatch.fairness import TenantCounts, WeightedFairQueue
from tests.fixtures.control import make_call, make_instance, make_version

KEY = VersionKey("f", 1)
TENANTS = st.sampled_from("abcde")


@dataclass(frozen=True, slots=True)
class Item:
    tenant: str
    arrival: int
    cost: int = 1


def make_queued(tenant: str, function: str = "f") -> QueuedRequest:
    return QueuedRequest(
        make_call(make_version(function), tenant=tenant), VersionKey(function, 1), 0.0, 0, hot=False
    )


def enqueue(admission: Admission, *queued: QueuedRequest) -> None:
    for one in queued:
        admission.enqueue(one)


class LineMachine(RuleBasedStateMachine):
    """A WeightedFairQueue beside a plain list of what waits and one of what is served."""

    def __init__(self) -> None:
        super().__init__()
        self.line: WeightedFairQueue[Item] = WeightedFairQueue()
        self.waiting: list[Item] = []
        self.served: list[Item] = []
        self.arrivals = 0

    @rule(tenant=TENANTS, cost=st.integers(0, 1000))
    def add(self, tenant: str, cost: int) -> None:
        self.arrivals += 1
        self.waiting.append(Item(tenant, self.arrivals, cost))
        self.line.add(self.waiting[-1])

    @rule(tenant=TENANTS, cost=st.integers(0, 1000))
    def serve(self, tenant: str, cost: int) -> None:
        if any(item.tenant == tenant for item in self.waiting):
            return
        self.arrivals += 1
        self.served.append(Item(tenant, self.arrivals, cost))
        self.line.serve(self.served[-1])

    @precondition(lambda self: self.waiting)
    @rule()
    def take_first(self) -> None:
        item = self.line.first()
        assert item in self.waiting
        active = Counter(other.tenant for other in self.served)
        assert active[item.tenant] == min(active[other.tenant] for other in self.waiting)
        assert item.arrival == min(other.arrival for other in self.waiting if other.tenant == item.tenant)
        self.line.start(item)
        self.waiting.remove(item)
        self.served.append(item)

    @precondition(lambda self: self.served)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        item = self.served.pop(data.draw(st.integers(0, len(self.served) - 1)))
        self.line.finish(item.tenant)

    @precondition(lambda self: self.served)
    @rule(data=st.data())
    def requeue(self, data: st.DataObject) -> None:
        item = self.served.pop(data.draw(st.integers(0, len(self.served) - 1)))
        self.line.requeue(item)
        self.waiting.append(item)

    @rule(tenant=TENANTS, arrival=st.integers(-1000, -1))
    def put_back(self, tenant: str, arrival: int) -> None:
        """Take over an item from another queue, in which it was before all that came here since."""
        item = Item(tenant, arrival)
        if item in self.waiting or item in self.served:
            return
        self.line.put_back(item)
        self.waiting.append(item)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        item = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        assert self.line.remove(item)
        assert not self.line.remove(item)

    @invariant()
    def agrees(self) -> None:
        self.line.check_integrity()
        assert (len(self.line), self.line.active) == (len(self.waiting), len(self.served))
        assert sorted(item.arrival for item in self.line) == sorted(item.arrival for item in self.waiting)
        assert self.line.tenants == len({item.tenant for item in (*self.waiting, *self.served)})
        assert (self.line.first() is None) == (not self.waiting)


def start_first(line: WeightedFairQueue[Item]) -> Item:
    item = line.first()
    assert item is not None
    line.start(item)
    return item


TestLine = LineMachine.TestCase


@given(
    st.integers(1, 20),
    st.lists(st.integers(1, 8), min_size=1, max_size=6),
    st.lists(st.integers(0, 10**6), min_size=20, max_size=60),
)
def test_tenants_that_always_wait_have_within_one_of_the_same_number_of_slots(
    slots: int, costs: list[int], ends: list[int]
) -> None:
    """Whoever came first, whatever their calls cost, in whatever order they end."""
    line: WeightedFairQueue[Item] = WeightedFairQueue()
    arrivals = 0
    served: list[Item] = []
    for number, cost in enumerate(costs):
        for _ in range(slots + len(ends)):
            arrivals += 1
            line.add(Item(f"t{number}", arrivals, cost))
    held = Counter()
    for end in [None] * slots + ends:
        if end is not None:
            done = served.pop(end % len(served))
            line.finish(done.tenant)
            held[done.tenant] -= 1
        item = start_first(line)
        served.append(item)
        held[item.tenant] += 1
        if len(served) == slots and len(costs) <= slots:
            counts = [held[f"t{number}"] for number in range(len(costs))]
            assert max(counts) - min(counts) <= 1
    assert len(served) == slots


@given(st.integers(2, 12), st.integers(1, 5))
def test_with_fewer_slots_than_tenants_each_has_its_turn(tenants: int, slots: int) -> None:
    line: WeightedFairQueue[Item] = WeightedFairQueue()
    turns: list[str] = []
    served: list[Item] = []
    for arrival in range(tenants * 40):
        line.add(Item(f"t{arrival * arrival % tenants}", arrival))
    names = {item.tenant for item in line}
    for _ in range(3 * len(names) + slots):
        if len(served) == slots:
            line.finish(served.pop(0).tenant)
        item = start_first(line)
        served.append(item)
        turns.append(item.tenant)
    for start in range(len(turns) - 2 * len(names)):
        assert set(turns[start : start + 2 * len(names)]) == names


def test_a_tenant_with_dear_calls_has_fewer_of_them() -> None:
    line: WeightedFairQueue[Item] = WeightedFairQueue()
    for arrival in range(0, 200, 2):
        line.add(Item("dear", arrival, 9))
        line.add(Item("cheap", arrival + 1, 1))
    turns: Counter[str] = Counter()
    for _ in range(50):
        item = start_first(line)
        line.finish(item.tenant)
        turns[item.tenant] += 1
    assert turns == {"cheap": 45, "dear": 5}


@given(st.lists(st.tuples(st.booleans(), TENANTS), max_size=80))
def test_counts_know_the_largest_tenant(changes: list[tuple[bool, str]]) -> None:
    tally, counts = TenantCounts(), Counter[str]()
    for add, name in changes:
        if add:
            tally.add(name)
            counts[name] += 1
        elif counts[name]:
            tally.drop(name)
            counts[name] -= 1
        most = max(counts.values(), default=0)
        assert (tally.most, tally.total) == (most, counts.total())
        assert tally.largest is None if not most else counts[tally.largest] == most
        assert all(tally[name] == count for name, count in counts.items())


def test_a_full_queue_rejects_the_calls_of_the_tenant_that_filled_it() -> None:
    admission = Admission(AdmissionLimits(held_per_function=10))
    flood = [make_queued("flood") for _ in range(10)]
    enqueue(admission, *flood)
    with pytest.raises(DispatchError, match="10 calls are queued for f"):
        admission.enqueue(make_queued("flood"))
    quiet = [make_queued("quiet") for _ in range(5)]
    enqueue(admission, *quiet)
    assert admission.held == 10
    refused = [one for one in flood if one.error is not None]
    assert refused == flood[5:]
    assert all(one.error.code == "overloaded" for one in refused if one.error)
    # By now both have the same: neither takes another's place.
    for tenant in ("quiet", "flood"):
        with pytest.raises(DispatchError):
            admission.enqueue(make_queued(tenant))
    admission.enqueue(make_queued("third"))
    assert [one.error is None for one in (flood[4], quiet[4])].count(False) == 1


def test_a_full_gateway_rejects_the_calls_of_the_tenant_that_filled_it() -> None:
    admission = Admission(AdmissionLimits(held=6))
    flood = [make_queued("flood", function) for function in "ggghhh"]
    enqueue(admission, *flood)
    quiet = make_queued("quiet", "f")
    admission.enqueue(quiet)
    assert admission.held == 6
    assert [one.error is None for one in flood].count(False) == 1
    admission.leave(quiet)
    for one in flood:
        admission.leave(one)
    assert admission.held == 0 and list(admission.queues()) == []


def test_a_call_that_was_on_an_instance_is_not_refused_for_another() -> None:
    admission = Admission(AdmissionLimits(held_per_function=2))
    served = [make_queued("flood") for _ in range(2)]
    for one in served:
        admission.enqueue(one)
        admission.assign(one, make_instance("i", "a"))
    for one in served:
        admission.requeue(one)
    with pytest.raises(DispatchError):
        admission.enqueue(make_queued("quiet"))
    assert [one.error for one in served] == [None, None]


def test_many_waiting_calls_cost_no_more_each_than_few() -> None:
    """Check that a queue of 20,000 calls is never searched call by call."""
    admission = Admission(AdmissionLimits(held_per_function=20_000, held=20_000))
    calls = [make_queued(f"t{i % 7}") for i in range(20_000)]
    enqueue(admission, *calls)
    queue = admission.queue(KEY)
    for one in reversed(calls[:10_000]):
        admission.leave(one)
    instance = make_instance("i", "a")
    taken = []
    while (one := queue.to_prefill.first()) is not None:
        admission.assign(one, instance)
        taken.append(one)
    for one in taken[::2]:
        admission.requeue(one)
    queue.to_prefill.check_integrity()
    assert [one.arrival for one in taken if one.tenant == "t0"] == sorted(
        one.arrival for one in taken if one.tenant == "t0"
    )
