"""The straggler detector of a cast: its verdicts on nodes' reports, and the nodes' new plans."""

import time

import pytest

from rdmacast.cast.pull_log import PullLog
from rdmacast.cast.record import CastMember, CastPlan
from rdmacast.cast.replanner import Replanner
from rdmacast.cast.spec import CastSpec
from rdmacast.protocol.pull_report import (
    MAX_ENDED,
    MAX_OPEN,
    MAX_PLANS,
    PullReport,
    StragglerVerdict,
    TimedPull,
)
from rdmacast.stragglers.detector import StragglerDetector, StragglerDetectors, report_interval_s

FIRST = StragglerVerdict(plan=0, slow=())


def spec(nodes: int = 6, sources: int = 1, **changes: object) -> CastSpec:
    values = {
        "cast_id": "c",
        "image": "image",
        "nbytes": 64,
        "block_bytes": 1,
        "members": tuple(
            CastMember(node=f"n{node}", host="", address=f"tcp://n{node}:1") for node in range(nodes)
        ),
        "sources": tuple(range(sources)),
        "planned": nodes,
        "planner": "chain",
    }
    return CastSpec(plan=CastPlan(**{**values, **changes}))  # type: ignore[arg-type]


class Fleet:
    """A chain whose nodes pull one block after the other, each at its own pace, by clocks of their own."""

    def __init__(self, each_s: dict[int, float], started_s: float = 1000.0) -> None:
        self.each_s = each_s
        self.started_s = started_s
        self.logs = {node: PullLog("c", node) for node in each_s}
        self.number = dict.fromkeys(each_s, 0)

    def reports(self, now_s: float, verdict: StragglerVerdict) -> list[PullReport]:
        reported = []
        for node, log in self.logs.items():
            zero_s = self.started_s * node  # clocks are not synchronised
            while (self.number[node] + 1) * self.each_s[node] <= now_s:
                log.on_started(self.number[node], node - 1, zero_s + self.number[node] * self.each_s[node])
                self.number[node] += 1
                log.on_ended(
                    self.number[node] - 1, zero_s + self.number[node] * self.each_s[node], arrived=True
                )
            reported.append(log.report(verdict.plan, verdict.slow, zero_s + now_s))
        return reported

    def watch(
        self, detector: StragglerDetector, looks: int, verdict: StragglerVerdict = FIRST
    ) -> list[StragglerVerdict]:
        """Return the verdicts after so many rounds of reports by nodes that follow `verdict`."""
        said = []
        for look in range(1, looks + 1):
            for report in self.reports(look * 0.11, verdict):
                found = detector.on_report(PullReport.decode(report.encode()), look * 0.11)
                said += [] if found is None else [found]
        return said


def test_a_slow_node_is_named_once_it_was_slow_in_several_looks() -> None:
    each_s = {1: 0.02, 2: 0.02, 3: 0.1, 4: 0.1, 5: 0.02}  # the third gives and takes slowly
    assert Fleet(each_s).watch(StragglerDetector(), 20) == [StragglerVerdict(plan=1, slow=(3,))]
    assert Fleet(dict.fromkeys(each_s, 0.02)).watch(StragglerDetector(), 20) == []


def test_the_next_observer_goes_on_with_the_plan_that_the_nodes_go_by() -> None:
    fleet = Fleet({1: 0.02, 2: 0.02, 3: 0.1, 4: 0.1, 5: 0.02})
    assert fleet.watch(StragglerDetector(), 20, StragglerVerdict(plan=1, slow=(5,))) == [
        StragglerVerdict(plan=2, slow=(3, 5))
    ]


def test_nodes_are_not_kept_planning() -> None:
    fleet = Fleet({1: 0.02, 2: 0.02, 3: 0.1, 4: 0.1, 5: 0.02})
    assert fleet.watch(StragglerDetector(), 20, StragglerVerdict(plan=MAX_PLANS, slow=())) == []


def test_who_was_away_hears_the_verdict_and_a_cast_is_forgotten_with_its_last_node() -> None:
    detectors = StragglerDetectors()
    on_report: dict[str, list[StragglerVerdict]] = {"a": [], "b": []}
    verdict = StragglerVerdict(plan=1, slow=(4,))
    detectors.on_report("a", PullReport(cast="c", node=1, plan=1, slow=(4,)), on_report["a"].append, 0.0)
    detectors.on_report("b", PullReport(cast="c", node=2, plan=0), on_report["b"].append, 0.1)
    assert on_report == {"a": [], "b": [verdict]}
    detectors.forget("a")
    assert len(detectors) == 1
    detectors.forget("b")
    assert len(detectors) == 0
    for number in range(1000):
        detectors.on_report("a", PullReport(cast=f"c{number}", node=1, plan=0), on_report["a"].append, 0.0)
    assert len(detectors) < 100


def test_a_teller_tells_of_one_node_only() -> None:
    """A broken one that names thousands would fill the memory, and have each look take minutes."""
    detectors, verdicts = StragglerDetectors(), list[StragglerVerdict]()
    for node in range(1000):
        reported = PullReport(
            cast="c", node=node, plan=0, ended=(TimedPull(source=0, started_us=1, duration_us=5),) * 8
        )
        detectors.on_report("liar", reported, verdicts.append, 1.0)
    assert "StragglerDetector(1 nodes" in repr(detectors)
    detectors.on_report("another", PullReport(cast="c", node=1, plan=0), verdicts.append, 1.0)
    detectors.on_report("liar", PullReport(cast="d", node=7, plan=0), verdicts.append, 1.0)
    assert "StragglerDetector(2 nodes" in repr(detectors) and len(detectors) == 2 and not verdicts


@pytest.mark.parametrize("nodes", [8, 64, 256])
def test_looking_takes_a_small_part_of_a_sources_time(nodes: int) -> None:
    """Processor time of the longest step, the least of three, beside the time between two."""
    detector, now_s, looks_s = StragglerDetector(), 1.0, []
    for _ in range(4):
        now_s += report_interval_s(nodes)
        longest_s, now_us = 0.0, int(now_s * 1e6)
        for node in range(1, nodes):
            ended = tuple(
                TimedPull(source=(node + age) % nodes, started_us=now_us - 100_000 * age, duration_us=90_000)
                for age in range(8, 0, -1)
            )
            reported = PullReport(cast="c", node=node, plan=0, clock_us=now_us, ended=ended)
            started_s = time.process_time()
            detector.on_report(reported, now_s)
            longest_s = max(longest_s, time.process_time() - started_s)
        looks_s.append(longest_s)
    assert min(looks_s[1:]) < 0.15 * report_interval_s(nodes)


def test_a_look_at_a_thousand_nodes_takes_little_longer_than_one_at_a_hundred() -> None:
    def look_s(nodes: int) -> float:
        """Of the processor, at its quickest."""
        detector = StragglerDetector()
        for now_s in range(2):
            for node in range(1, nodes):
                pulls = [
                    TimedPull(source=node - 1, started_us=20 * at, duration_us=10) for at in range(MAX_OPEN)
                ]
                reported = PullReport(
                    cast="c",
                    node=node,
                    plan=0,
                    clock_us=now_s,
                    ended=tuple(pulls[:MAX_ENDED]),
                    pending=tuple(pulls),
                )
                detector.on_report(reported, now_s * 0.001)  # no look yet
        looks_s = []
        for look in range(1, 4):
            started_s = time.process_time()
            detector.on_report(reported, 1000.0 * look)
            looks_s.append(time.process_time() - started_s)
        return min(looks_s)

    assert look_s(1024) < 4 * look_s(128)


def test_a_node_tells_the_first_source_that_is_left_and_takes_only_newer_plans() -> None:
    replanner = Replanner(spec(sources=2), 4)
    assert replanner.detector == 0
    replanner.on_peer_lost(3)
    replanner.on_peer_lost(0)
    assert replanner.detector == 1
    order = replanner.on_verdict(StragglerVerdict(plan=2, slow=(3,)))
    assert order == spec(sources=2).order(4, (3,)) and 3 not in {source for source, _ in order or ()}
    assert (
        replanner.on_verdict(StragglerVerdict(plan=1, slow=()))
        is replanner.on_verdict(StragglerVerdict(plan=2, slow=()))
        is None
    )
    assert replanner.report(0.0).plan == 2 and replanner.report(0.0).slow == (3,)
    replanner.on_peer_lost(1)
    assert replanner.detector is None
    assert Replanner(spec(nodes=3), 2).detector is Replanner(spec(), 0).detector is None


def test_those_at_the_edge_give_nothing_by_the_plan() -> None:
    cast = spec(planned=5, edge=(2,))
    orders = {node: cast.order(node) for node in range(6)}
    assert {source for source, _ in orders[5] or ()} <= {1, 3, 4}  # joined later
    assert {source for source, _ in orders[2] or ()} == {0, 1, 3, 4}
    assert {source for node in (1, 3, 4) for source, _ in orders[node] or ()} == {0, 1, 3}
