"""Detects the slow nodes of casts by the pulls that all their nodes report (pure).

The first living source of a cast runs its detector: it is there before the cast begins and outlives the
controller. Verdicts are numbered, and every report has the node's plan number and slow nodes, so that the
next detector continues where the last one ended.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator

from rdmacast.protocol.pull_report import (
    MAX_ENDED,
    MAX_PLANS,
    MAX_SLOW,
    PullReport,
    StragglerVerdict,
    TimedPull,
)
from rdmacast.stragglers.slow_nodes import ObservedPull, slow_neighbours, slow_nodes

MIN_MEMBERS = 4  # with fewer nodes none can be found slow
_MAX_CASTS = 64
_MAX_REPORTERS = 4096
_MIN_ROUNDS = 4  # consecutive rounds that find a node slow
_MIN_INTERVAL_S = 0.05
# Of the interval, by node of the cast: a round takes 0.35 ms of it, and the source has other work.
_INTERVAL_PER_NODE_S = 0.0125
_MAX_PULLS = 3072  # of one round: some 0.1 s, in which the source does nothing else

OnVerdict = Callable[[StragglerVerdict], None]


def report_interval_s(members: int) -> float:
    """Return the interval between a node's reports in a cast of that size."""
    return max(_MIN_INTERVAL_S, members * _INTERVAL_PER_NODE_S)


class _Reporter:
    """One node that reports; `offset_s` is its clock's offset from ours, estimated by the fastest report."""

    def __init__(self) -> None:
        self.offset_s = float("inf")
        self.ended: deque[TimedPull] = deque(maxlen=MAX_ENDED)
        self.pending: tuple[TimedPull, ...] = ()
        self.clock_us = 0

    def on_report(self, report: PullReport, now_s: float) -> None:
        self.offset_s = min(self.offset_s, now_s - report.clock_us / 1e6)
        self.clock_us = report.clock_us
        self.ended.extend(report.ended)
        self.pending = report.pending

    def pulls(self, node: int, most: int) -> Iterator[ObservedPull]:
        """Yield at most `most` pulls, the latest of each kind."""
        pending = self.pending[-most:]
        ended = tuple(self.ended)
        for pull in ended[max(0, len(ended) - max(1, most - len(pending))) :]:
            yield self._pulled(node, pull, False)
        for pull in pending:
            yield self._pulled(node, pull, True)

    def _pulled(self, node: int, pull: TimedPull, open_: bool) -> ObservedPull:
        started_s = self.offset_s + pull.started_us / 1e6
        return ObservedPull(pull.source, node, started_s, started_s + pull.duration_us / 1e6, open_)


class StragglerDetector:
    """The detector of one cast."""

    def __init__(self) -> None:
        self._reporters: dict[int, _Reporter] = {}
        self._verdict = StragglerVerdict(plan=0, slow=())
        self._evaluated_s = float("-inf")
        self._max_blocks_per_s: float | None = None  # blocks a second that links were measured to carry
        self._found = Counter[int]()  # in how many looks up to the last
        self._suspects: frozenset[int] = frozenset()  # others may have been blamed for them

    def __repr__(self) -> str:
        return f"StragglerDetector({len(self._reporters)} nodes, {self._verdict})"

    @property
    def verdict(self) -> StragglerVerdict:
        """The latest verdict; plan 0 means that there was none yet."""
        return self._verdict

    def on_report(self, report: PullReport, now_s: float) -> StragglerVerdict | None:
        """Record a report; returns a new verdict if it leads to one.

        Reports under an older plan than the latest are ignored.
        """
        if report.plan < self._verdict.plan:
            return None
        if report.plan > self._verdict.plan or not self._reporters:
            self._adopt(StragglerVerdict(plan=report.plan, slow=report.slow))
        if report.node not in self._reporters and len(self._reporters) >= _MAX_REPORTERS:
            return None
        self._reporters.setdefault(report.node, _Reporter()).on_report(report, now_s)
        self._max_blocks_per_s = 1e6 / report.block_us if report.block_us else None
        # Reports of all nodes arrive at about the same time, not at exact intervals.
        if now_s - self._evaluated_s < 0.7 * report_interval_s(len(self._reporters)):
            return None
        self._evaluated_s = now_s
        return self._evaluate()

    def _evaluate(self) -> StragglerVerdict | None:
        if self._verdict.plan >= MAX_PLANS:
            return None
        known, most = set(self._verdict.slow), max(1, _MAX_PULLS // len(self._reporters))
        pulls = [
            pull
            for node, reporter in self._reporters.items()
            if node not in known
            for pull in reporter.pulls(node, most)
            if pull.source not in known
        ]
        slow = slow_nodes(pulls, self._suspects, self._max_blocks_per_s)
        self._found = Counter({node: self._found[node] + 1 for node in slow})
        sure = {node for node, rounds in self._found.items() if rounds >= _MIN_ROUNDS}
        if not sure or len(known | sure) > MAX_SLOW:
            return None
        self._suspects |= slow_neighbours(pulls, sure, self._max_blocks_per_s)
        self._adopt(StragglerVerdict(plan=self._verdict.plan + 1, slow=tuple(sorted(known | sure))))
        return self._verdict

    def _adopt(self, verdict: StragglerVerdict) -> None:
        self._verdict = verdict
        self._reporters.clear()
        self._found.clear()


class StragglerDetectors:
    """The detectors of a node, one a cast, each removed with the last reporter of the cast."""

    def __init__(self) -> None:
        self._casts: dict[str, tuple[StragglerDetector, dict[object, tuple[int, OnVerdict]]]] = {}

    def __repr__(self) -> str:
        return f"Observers({self._casts})"

    def __len__(self) -> int:
        return len(self._casts)

    def on_report(self, reporter: object, report: PullReport, steer: OnVerdict, now_s: float) -> None:
        """Pass a report to its cast's detector; `steer` receives each verdict until the reporter is removed.

        Above a bound casts have no detector. A reporter that changes its node's number is ignored.
        """
        if report.cast not in self._casts:
            if len(self._casts) >= _MAX_CASTS:
                return
            self._casts[report.cast] = StragglerDetector(), {}
        detector, reporters = self._casts[report.cast]
        if reporters.setdefault(reporter, (report.node, steer))[0] != report.node:
            return
        reporters[reporter] = report.node, steer
        verdict = detector.on_report(report, now_s)
        if verdict is not None:
            for _, each in tuple(reporters.values()):
                each(verdict)
        elif report.plan < detector.verdict.plan:
            steer(detector.verdict)  # it joined after that verdict

    def forget(self, reporter: object) -> None:
        for cast, (_, reporters) in list(self._casts.items()):
            if reporters.pop(reporter, None) is not None and not reporters:
                del self._casts[cast]
