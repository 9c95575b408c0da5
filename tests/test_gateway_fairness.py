"""Fair queueing: nobody starves, slots are shared evenly, and a flood is a small wait for others."""

import random
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from control_fixture import make_call, make_instance, make_version
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.admission import Admission, AdmissionLimits, Ticket
from gateway.contract import DispatchError
from gateway.directory import VersionKey
from gateway.fairness import FairLine, Tally
from gateway.router import Slots, slots_of
from invoker.engine.pages import PageAllocator
from invoker.engine.scheduler import Limits, Scheduler, StepPlan

KEY = VersionKey("f", 1)
TENANTS = st.sampled_from("abcde")


@dataclass(frozen=True, slots=True)
class Item:
    tenant: str
    arrival: int
    cost: int = 1


def ticket(tenant: str, function: str = "f") -> Ticket:
    return Ticket(make_call(make_version(function), tenant=tenant), 0.0, 0, hot=False)


class LineMachine(RuleBasedStateMachine):
    """A FairLine beside a plain list of what waits and one of what is served."""

    def __init__(self) -> None:
        super().__init__()
        self.line: FairLine[Item] = FairLine()
        self.waiting: list[Item] = []
        self.served: list[Item] = []
        self.arrivals = 0

    @rule(tenant=TENANTS, cost=st.integers(0, 1000))
    def add(self, tenant: str, cost: int) -> None:
        self.arrivals += 1
        self.waiting.append(Item(tenant, self.arrivals, cost))
        self.line.add(self.waiting[-1])

    @precondition(lambda self: self.waiting)
    @rule()
    def take_first(self) -> None:
        item = self.line.first()
        assert item in self.waiting
        active = Counter(other.tenant for other in self.served)
        assert active[item.tenant] == min(active[other.tenant] for other in self.waiting)
        assert item.arrival == min(other.arrival for other in self.waiting if other.tenant == item.tenant)
        self.line.take(item)
        self.waiting.remove(item)
        self.served.append(item)

    @precondition(lambda self: self.served)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        item = self.served.pop(data.draw(st.integers(0, len(self.served) - 1)))
        self.line.finish(item.tenant)

    @precondition(lambda self: self.served)
    @rule(data=st.data())
    def put_back(self, data: st.DataObject) -> None:
        item = self.served.pop(data.draw(st.integers(0, len(self.served) - 1)))
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


TestLine = LineMachine.TestCase
TestLine.settings = settings(deadline=None)


@settings(deadline=None)
@given(
    st.integers(1, 20),
    st.lists(st.integers(1, 8), min_size=1, max_size=6),
    st.lists(st.integers(0, 10**6), min_size=20, max_size=60),
)
def test_tenants_that_always_wait_have_within_one_of_the_same_number_of_slots(
    slots: int, costs: list[int], ends: list[int]
) -> None:
    """Whoever came first, whatever their calls cost, in whatever order they end."""
    line: FairLine[Item] = FairLine()
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
        item = line.first()
        assert item is not None
        line.take(item)
        served.append(item)
        held[item.tenant] += 1
        if len(served) == slots and len(costs) <= slots:
            counts = [held[f"t{number}"] for number in range(len(costs))]
            assert max(counts) - min(counts) <= 1
    assert len(served) == slots


@settings(deadline=None)
@given(st.integers(2, 12), st.integers(1, 5))
def test_with_fewer_slots_than_tenants_each_has_its_turn(tenants: int, slots: int) -> None:
    line: FairLine[Item] = FairLine()
    turns: list[str] = []
    served: list[Item] = []
    for arrival in range(tenants * 40):
        line.add(Item(f"t{arrival * arrival % tenants}", arrival))
    names = {item.tenant for item in line}
    for _ in range(3 * len(names) + slots):
        if len(served) == slots:
            line.finish(served.pop(0).tenant)
        item = line.first()
        assert item is not None
        line.take(item)
        served.append(item)
        turns.append(item.tenant)
    for start in range(len(turns) - 2 * len(names)):
        assert set(turns[start : start + 2 * len(names)]) == names


def test_a_tenant_with_dear_calls_has_fewer_of_them() -> None:
    line: FairLine[Item] = FairLine()
    for arrival in range(0, 200, 2):
        line.add(Item("dear", arrival, 9))
        line.add(Item("cheap", arrival + 1, 1))
    turns: Counter[str] = Counter()
    for _ in range(50):
        item = line.first()
        assert item is not None
        line.take(item)
        line.finish(item.tenant)
        turns[item.tenant] += 1
    assert turns == {"cheap": 45, "dear": 5}


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), TENANTS), max_size=80))
def test_a_tally_knows_who_has_most(changes: list[tuple[bool, str]]) -> None:
    tally, counts = Tally(), Counter[str]()
    for add, name in changes:
        if add:
            tally.add(name)
            counts[name] += 1
        elif counts[name]:
            tally.drop(name)
            counts[name] -= 1
        most = max(counts.values(), default=0)
        assert (tally.most, tally.total) == (most, counts.total())
        assert tally.richest is None if not most else counts[tally.richest] == most
        assert all(tally[name] == count for name, count in counts.items())


def test_a_full_lane_refuses_the_calls_of_whoever_filled_it() -> None:
    admission = Admission(AdmissionLimits(held_per_function=10))
    flood = [ticket("flood") for _ in range(10)]
    for one in flood:
        admission.hold(one)
    with pytest.raises(DispatchError, match="10 calls wait for f"):
        admission.hold(ticket("flood"))
    quiet = [ticket("quiet") for _ in range(5)]
    for one in quiet:
        admission.hold(one)
    assert admission.held == 10
    refused = [one for one in flood if one.error is not None]
    assert refused == flood[5:]
    assert all(one.error.code == "overloaded" and one.wake.is_set() for one in refused if one.error)
    # By now both have the same: neither takes another's place.
    for tenant in ("quiet", "flood"):
        with pytest.raises(DispatchError):
            admission.hold(ticket(tenant))
    admission.hold(ticket("third"))
    assert [one.error is None for one in (flood[4], quiet[4])].count(False) == 1


def test_a_full_gateway_refuses_the_calls_of_whoever_filled_it() -> None:
    admission = Admission(AdmissionLimits(held=6))
    flood = [ticket("flood", function) for function in "ggghhh"]
    for one in flood:
        admission.hold(one)
    quiet = ticket("quiet", "f")
    admission.hold(quiet)
    assert admission.held == 6
    assert [one.error is None for one in flood].count(False) == 1
    admission.leave(quiet)
    for one in flood:
        admission.leave(one)
    assert admission.held == 0 and list(admission.lanes()) == []


def test_a_call_that_was_on_an_instance_is_not_refused_for_another() -> None:
    admission = Admission(AdmissionLimits(held_per_function=2))
    served = [ticket("flood") for _ in range(2)]
    for one in served:
        admission.hold(one)
        admission.assign(one, make_instance("i", "a"))
    for one in served:
        admission.hold_again(one)
    with pytest.raises(DispatchError):
        admission.hold(ticket("quiet"))
    assert [one.error for one in served] == [None, None]


def test_many_waiting_calls_cost_no_more_each_than_few() -> None:
    """A lane of 20,000 would take minutes if anything on its way went through it call by call."""
    admission = Admission(AdmissionLimits(held_per_function=20_000, held=20_000))
    calls = [ticket(f"t{i % 7}") for i in range(20_000)]
    for one in calls:
        admission.hold(one)
    lane = admission.lane(KEY)
    for one in reversed(calls[:10_000]):
        admission.leave(one)
    instance = make_instance("i", "a")
    taken = []
    while (one := lane.held.first()) is not None:
        admission.assign(one, instance)
        taken.append(one)
    for one in taken[::2]:
        admission.hold_again(one)
    lane.held.check_integrity()
    assert [one.arrival for one in taken if one.tenant == "t0"] == sorted(
        one.arrival for one in taken if one.tenant == "t0"
    )


# A simulation without processes: the lane of a gateway before the scheduler of an engine. Time passes
# by what a step costs.

Cost = Callable[[StepPlan], float]


def cost(*, step_ms: float, token_ms: float, prompt_ms: float = 0.0) -> Cost:
    """What a step costs by itself, by its tokens, and by the prompts that run in it beside others."""

    def of(plan: StepPlan) -> float:
        prompts = sum(chunk.count > 1 for chunk in plan.chunks)
        beside = prompts if len(plan.chunks) > 1 else 0
        return step_ms + token_ms * sum(chunk.count for chunk in plan.chunks) + prompt_ms * beside

    return of


COSTS = {  # a processor's small model, its larger one, and an accelerator that a few hundred tokens fill
    "small": (
        cost(step_ms=3.0, token_ms=0.1, prompt_ms=2.0),
        Limits(sequences=64, prefill_tokens=512, turn_tokens=48),
    ),
    "large": (cost(step_ms=15.0, token_ms=1.2), Limits(sequences=64, prefill_tokens=512, turn_tokens=48)),
    "accelerator": (
        cost(step_ms=6.0, token_ms=0.02),
        Limits(sequences=64, prefill_tokens=512, turn_tokens=128),
    ),
}


@dataclass(slots=True, eq=False)
class Request:
    """A call of the simulation: when it came, and what is left of it."""

    ticket: Ticket
    prompt: int
    output: int
    quiet: bool
    came_ms: float
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.output


class Simulation:
    """One instance of eight slots. `flood` connections send a call after the other; a quiet client does
    the same by itself, with pauses. Its times to first token are in `first_ms`."""

    def __init__(self, kind: str, *, flood: int, quiet_prompt: int, quiet_tenant: str = "quiet") -> None:
        self._cost, limits = COSTS[kind]
        self._scheduler = Scheduler(limits, PageAllocator(8 * 64))
        self._admission = Admission(AdmissionLimits())
        self._slots = Slots()
        self._instance = make_instance("i", "a", max_concurrency=8)
        self._rng = random.Random(5)
        self._requests: dict[Ticket, Request] = {}
        self._running: dict[str, Request] = {}
        self._now_ms = 0.0
        self._next_quiet_ms = 100.0
        self._quiet = quiet_tenant, quiet_prompt
        self.first_ms: list[float] = []
        self.flooded_tokens = 0
        for _ in range(flood):
            self._flood()

    def run(self, requests: int) -> None:
        while len(self.first_ms) < requests:
            if self._next_quiet_ms <= self._now_ms:
                self._arrive(*self._quiet, 16, self._next_quiet_ms, quiet=True)
                self._next_quiet_ms = float("inf")
            self._assign()
            plan = self._scheduler.plan()
            if not plan.chunks:
                self._now_ms = self._next_quiet_ms
                continue
            self._now_ms += self._cost(plan)
            self._scheduler.ran()
            self._scheduler.check_integrity()
            for chunk in plan.chunks:
                if chunk.last:
                    self._token(chunk.request_id)

    def _flood(self) -> None:
        self._arrive("flood", self._rng.randint(300, 600), 128, self._now_ms, quiet=False)

    def _arrive(self, tenant: str, prompt: int, output: int, now_ms: float, *, quiet: bool) -> None:
        call = make_call(make_version(), tenant=tenant, prompt=(1,) * prompt, tokens=output)
        request = Request(Ticket(call, now_ms / 1000, 0, hot=True), prompt, output, quiet, now_ms)
        self._requests[request.ticket] = request
        self._admission.hold(request.ticket)

    def _assign(self) -> None:
        line = self._admission.lane(KEY).held
        while (ticket := line.first()) is not None:
            owed = line.is_owed(ticket.tenant, slots_of(self._instance))
            chosen = self._slots.choose([self._instance], self._rng, self._now_ms, owed=owed).instance
            if chosen is None:
                return
            self._slots.take(chosen.instance_id)
            self._admission.assign(ticket, chosen)
            self._running[str(ticket.arrival)] = request = self._requests.pop(ticket)
            self._scheduler.add(str(ticket.arrival), request.prompt, ticket.tenant)

    def _token(self, name: str) -> None:
        request = self._running[name]
        if request.quiet and request.left == request.output:
            self.first_ms.append(self._now_ms - request.came_ms)
        self.flooded_tokens += not request.quiet
        request.left -= 1
        if request.left:
            self._scheduler.append_token(name)
            return
        self._scheduler.remove(name)
        del self._running[name]
        self._slots.free("i")
        self._admission.leave(request.ticket)
        if request.quiet:
            self._next_quiet_ms = self._now_ms + self._rng.uniform(0, 50)
        else:
            self._flood()


def p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20, method="inclusive")[-1]


@pytest.mark.parametrize("prompt", [64, 128, 512])
@pytest.mark.parametrize("kind", COSTS)
def test_a_flood_at_most_doubles_the_p95_time_to_first_token_of_others(kind: str, prompt: int) -> None:
    alone = Simulation(kind, flood=0, quiet_prompt=prompt)
    alone.run(50)
    flooded = Simulation(kind, flood=64, quiet_prompt=prompt)
    flooded.run(50)
    assert p95(flooded.first_ms) <= 2 * p95(alone.first_ms)
    assert flooded.flooded_tokens > 0


def test_without_tenants_the_same_flood_is_felt() -> None:
    """What the simulation shows if all calls belong to one: the wait is for whole answers."""
    alone = Simulation("large", flood=0, quiet_prompt=128)
    alone.run(10)
    flooded = Simulation("large", flood=64, quiet_prompt=128, quiet_tenant="flood")
    flooded.run(10)
    assert statistics.median(flooded.first_ms) > 50 * statistics.median(alone.first_ms)
