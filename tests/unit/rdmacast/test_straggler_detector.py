"""The observer of a cast: what it makes of its nodes' reports, and what they make of its verdicts."""

import time

import pytest

from rdmacast.cast_spec import CastSpec, Member
from rdmacast.observer import Observer, Observers, report_every_s
from rdmacast.pull_log import PullLog
from rdmacast.pull_report import MOST_ENDED, MOST_OPEN, MOST_PLANS, PullReport, TimedPull, Verdict
from rdmacast.steering import Steering
from rdmacast.transport import PeerAddress

FIRST = Verdict(plan=0, slow=())


def spec(nodes: int = 6, sources: int = 1, **changes: object) -> CastSpec:
    values = {
        "cast": "c",
        "region": "image",
        "nbytes": 64,
        "block_bytes": 1,
        "members": tuple(
            Member(name=f"n{node}", address=PeerAddress(url=f"tcp://n{node}:1", host=""))
            for node in range(nodes)
        ),
        "sources": tuple(range(sources)),
        "planner": "chain",
    }
    return CastSpec(**{**values, **changes})  # type: ignore[arg-type]


class Fleet:
    """A chain whose nodes pull one block after the other, each at its own pace, by clocks of their own."""

    def __init__(self, each_s: dict[int, float], begun_s: float = 1000.0) -> None:
        self.each_s = each_s
        self.begun_s = begun_s
        self.logs = {node: PullLog("c", node) for node in each_s}
        self.number = dict.fromkeys(each_s, 0)

    def reports(self, now_s: float, verdict: Verdict) -> list[PullReport]:
        told = []
        for node, log in self.logs.items():
            zero_s = self.begun_s * node  # clocks tell nothing of each other
            while (self.number[node] + 1) * self.each_s[node] <= now_s:
                log.began(self.number[node], node - 1, zero_s + self.number[node] * self.each_s[node])
                self.number[node] += 1
                log.ended(self.number[node] - 1, zero_s + self.number[node] * self.each_s[node], came=True)
            told.append(log.report(verdict.plan, verdict.slow, zero_s + now_s))
        return told

    def watch(self, observer: Observer, looks: int, verdict: Verdict = FIRST) -> list[Verdict]:
        """What so many rounds of reports make it say, to nodes that go by `verdict`."""
        said = []
        for look in range(1, looks + 1):
            for report in self.reports(look * 0.11, verdict):
                found = observer.heard(PullReport.decode(report.encode()), look * 0.11)
                said += [] if found is None else [found]
        return said


def test_a_slow_node_is_named_once_it_was_slow_in_several_looks() -> None:
    each_s = {1: 0.02, 2: 0.02, 3: 0.1, 4: 0.1, 5: 0.02}  # the third gives and takes slowly
    assert Fleet(each_s).watch(Observer(), 20) == [Verdict(plan=1, slow=(3,))]
    assert Fleet(dict.fromkeys(each_s, 0.02)).watch(Observer(), 20) == []


def test_the_next_observer_goes_on_with_the_plan_that_the_nodes_go_by() -> None:
    fleet = Fleet({1: 0.02, 2: 0.02, 3: 0.1, 4: 0.1, 5: 0.02})
    assert fleet.watch(Observer(), 20, Verdict(plan=1, slow=(5,))) == [Verdict(plan=2, slow=(3, 5))]


def test_nodes_are_not_kept_planning() -> None:
    fleet = Fleet({1: 0.02, 2: 0.02, 3: 0.1, 4: 0.1, 5: 0.02})
    assert fleet.watch(Observer(), 20, Verdict(plan=MOST_PLANS, slow=())) == []


def test_who_was_away_hears_the_verdict_and_a_cast_is_forgotten_with_its_last_node() -> None:
    observers = Observers()
    heard: dict[str, list[Verdict]] = {"a": [], "b": []}
    verdict = Verdict(plan=1, slow=(4,))
    observers.heard("a", PullReport(cast="c", node=1, plan=1, slow=(4,)), heard["a"].append, 0.0)
    observers.heard("b", PullReport(cast="c", node=2, plan=0), heard["b"].append, 0.1)
    assert heard == {"a": [], "b": [verdict]}
    observers.forget("a")
    assert len(observers) == 1
    observers.forget("b")
    assert len(observers) == 0
    for number in range(1000):
        observers.heard("a", PullReport(cast=f"c{number}", node=1, plan=0), heard["a"].append, 0.0)
    assert len(observers) < 100


def test_a_teller_tells_of_one_node_only() -> None:
    """A broken one that names thousands would fill the memory, and have each look take minutes."""
    observers, verdicts = Observers(), list[Verdict]()
    for node in range(1000):
        told = PullReport(
            cast="c", node=node, plan=0, ended=(TimedPull(source=0, began_us=1, lasted_us=5),) * 8
        )
        observers.heard("liar", told, verdicts.append, 1.0)
    assert "Observer(1 nodes" in repr(observers)
    observers.heard("another", PullReport(cast="c", node=1, plan=0), verdicts.append, 1.0)
    observers.heard("liar", PullReport(cast="d", node=7, plan=0), verdicts.append, 1.0)
    assert "Observer(2 nodes" in repr(observers) and len(observers) == 2 and not verdicts


@pytest.mark.parametrize("nodes", [8, 64, 256])
def test_looking_takes_a_small_part_of_a_sources_time(nodes: int) -> None:
    """Processor time of the longest step, the least of three, beside the time between two."""
    observer, now_s, looks_s = Observer(), 1.0, []
    for _ in range(4):
        now_s += report_every_s(nodes)
        longest_s, now_us = 0.0, int(now_s * 1e6)
        for node in range(1, nodes):
            ended = tuple(
                TimedPull(source=(node + age) % nodes, began_us=now_us - 100_000 * age, lasted_us=90_000)
                for age in range(8, 0, -1)
            )
            told = PullReport(cast="c", node=node, plan=0, clock_us=now_us, ended=ended)
            began_s = time.process_time()
            observer.heard(told, now_s)
            longest_s = max(longest_s, time.process_time() - began_s)
        looks_s.append(longest_s)
    assert min(looks_s[1:]) < 0.15 * report_every_s(nodes)


def test_a_look_at_a_thousand_nodes_takes_little_longer_than_one_at_a_hundred() -> None:
    def look_s(nodes: int) -> float:
        """Of the processor, at its quickest."""
        observer = Observer()
        for now_s in range(2):
            for node in range(1, nodes):
                pulls = [
                    TimedPull(source=node - 1, began_us=20 * at, lasted_us=10) for at in range(MOST_OPEN)
                ]
                told = PullReport(
                    cast="c",
                    node=node,
                    plan=0,
                    clock_us=now_s,
                    ended=tuple(pulls[:MOST_ENDED]),
                    under_way=tuple(pulls),
                )
                observer.heard(told, now_s * 0.001)  # no look yet
        looks_s = []
        for look in range(1, 4):
            began_s = time.process_time()
            observer.heard(told, 1000.0 * look)
            looks_s.append(time.process_time() - began_s)
        return min(looks_s)

    assert look_s(1024) < 4 * look_s(128)


def test_a_node_tells_the_first_source_that_is_left_and_takes_only_newer_plans() -> None:
    steering = Steering(spec(sources=2), 4)
    assert steering.observer == 0
    steering.lost(3)
    steering.lost(0)
    assert steering.observer == 1
    order = steering.steered(Verdict(plan=2, slow=(3,)))
    assert order == spec(sources=2).order(4, (3,)) and 3 not in {source for source, _ in order or ()}
    assert steering.steered(Verdict(plan=1, slow=())) is steering.steered(Verdict(plan=2, slow=())) is None
    assert steering.report(0.0).plan == 2 and steering.report(0.0).slow == (3,)
    steering.lost(1)
    assert steering.observer is None
    assert Steering(spec(nodes=3), 2).observer is Steering(spec(), 0).observer is None


def test_those_at_the_edge_and_those_that_joined_later_give_nothing_by_the_plan() -> None:
    cast = spec(planned=5, edge=(2,))
    orders = {node: cast.order(node) for node in range(6)}
    assert orders[5] == ()
    assert {source for source, _ in orders[2] or ()} == {0, 1, 3, 4}
    assert {source for node in (1, 3, 4) for source, _ in orders[node] or ()} == {0, 1, 3}
