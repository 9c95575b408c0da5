"""Finds the slow nodes of casts by what all their nodes tell of their pulls (pure).

The first source of a cast that lives is its observer: it is there before the cast begins and outlives the
controller. What it says is numbered, and nodes tell their plan's number and slow nodes with every report,
so that the next observer goes on where the last one was.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator

from rdmacast.pull_report import MOST_ENDED, MOST_PLANS, MOST_SLOW, PullReport, TimedPull, Verdict
from rdmacast.stragglers import Pulled, beside, slow_nodes

LEAST_MEMBERS = 4  # with fewer nobody can say who is slow
_MOST_CASTS = 64
_MOST_TELLERS = 4096
_LOOKS = 4  # one after the other that find a node slow
_EVERY_S = 0.05
# Of time between reports, a node of the cast: a look takes 0.35 ms of it, and the observer has other work.
_NODE_S = 0.0125
_MOST_PULLS = 3072  # that one look is at: some 0.1 s, for which the source does nothing else

Steer = Callable[[Verdict], None]


def report_every_s(members: int) -> float:
    """How often a node of so large a cast tells of its pulls."""
    return max(_EVERY_S, members * _NODE_S)


class _Teller:
    """One node that reports. `offset_s` is what its clock is behind ours; the quickest report tells best."""

    def __init__(self) -> None:
        self.offset_s = float("inf")
        self.ended: deque[TimedPull] = deque(maxlen=MOST_ENDED)
        self.under_way: tuple[TimedPull, ...] = ()
        self.clock_us = 0

    def heard(self, report: PullReport, now_s: float) -> None:
        self.offset_s = min(self.offset_s, now_s - report.clock_us / 1e6)
        self.clock_us = report.clock_us
        self.ended.extend(report.ended)
        self.under_way = report.under_way

    def pulls(self, node: int, most: int) -> Iterator[Pulled]:
        """At most so many, the latest of each kind."""
        under_way = self.under_way[-most:]
        ended = tuple(self.ended)
        for pull in ended[max(0, len(ended) - max(1, most - len(under_way))) :]:
            yield self._pulled(node, pull, False)
        for pull in under_way:
            yield self._pulled(node, pull, True)

    def _pulled(self, node: int, pull: TimedPull, open_: bool) -> Pulled:
        began_s = self.offset_s + pull.began_us / 1e6
        return Pulled(pull.source, node, began_s, began_s + pull.lasted_us / 1e6, open_)


class Observer:
    """Of one cast."""

    def __init__(self) -> None:
        self._tellers: dict[int, _Teller] = {}
        self._verdict = Verdict(plan=0, slow=())
        self._looked_s = float("-inf")
        self._most: float | None = None  # blocks a second that links were measured to carry
        self._found = Counter[int]()  # in how many looks up to the last
        self._suspects: frozenset[int] = frozenset()  # others may have been blamed for them

    def __repr__(self) -> str:
        return f"Observer({len(self._tellers)} nodes, {self._verdict})"

    @property
    def verdict(self) -> Verdict:
        """The latest; of plan 0 none was given yet."""
        return self._verdict

    def heard(self, report: PullReport, now_s: float) -> Verdict | None:
        """A new verdict, if this report makes for one.

        What was seen under another plan than the latest tells nothing.
        """
        if report.plan < self._verdict.plan:
            return None
        if report.plan > self._verdict.plan or not self._tellers:
            self._take(Verdict(plan=report.plan, slow=report.slow))
        if report.node not in self._tellers and len(self._tellers) >= _MOST_TELLERS:
            return None
        self._tellers.setdefault(report.node, _Teller()).heard(report, now_s)
        self._most = 1e6 / report.block_us if report.block_us else None
        # Reports of all nodes come at about the same time: not exactly so long after each other.
        if now_s - self._looked_s < 0.7 * report_every_s(len(self._tellers)):
            return None
        self._looked_s = now_s
        return self._look()

    def _look(self) -> Verdict | None:
        if self._verdict.plan >= MOST_PLANS:
            return None
        known, most = set(self._verdict.slow), max(1, _MOST_PULLS // len(self._tellers))
        pulls = [
            pull
            for node, teller in self._tellers.items()
            if node not in known
            for pull in teller.pulls(node, most)
            if pull.source not in known
        ]
        slow = slow_nodes(pulls, self._suspects, self._most)
        self._found = Counter({node: self._found[node] + 1 for node in slow})
        sure = {node for node, looks in self._found.items() if looks >= _LOOKS}
        if not sure or len(known | sure) > MOST_SLOW:
            return None
        self._suspects |= beside(pulls, sure, self._most)
        self._take(Verdict(plan=self._verdict.plan + 1, slow=tuple(sorted(known | sure))))
        return self._verdict

    def _take(self, verdict: Verdict) -> None:
        self._verdict = verdict
        self._tellers.clear()
        self._found.clear()


class Observers:
    """The casts that a node observes; each is forgotten with the last of those that report of it."""

    def __init__(self) -> None:
        self._casts: dict[str, tuple[Observer, dict[object, tuple[int, Steer]]]] = {}

    def __repr__(self) -> str:
        return f"Observers({self._casts})"

    def __len__(self) -> int:
        return len(self._casts)

    def heard(self, teller: object, report: PullReport, steer: Steer, now_s: float) -> None:
        """`steer` is given each verdict on the cast until the teller is forgotten. Of too many casts some
        are not observed, and no teller is believed what it says of another node than at first."""
        if report.cast not in self._casts:
            if len(self._casts) >= _MOST_CASTS:
                return
            self._casts[report.cast] = Observer(), {}
        observer, tellers = self._casts[report.cast]
        if tellers.setdefault(teller, (report.node, steer))[0] != report.node:
            return
        tellers[teller] = report.node, steer
        verdict = observer.heard(report, now_s)
        if verdict is not None:
            for _, each in tuple(tellers.values()):
                each(verdict)
        elif report.plan < observer.verdict.plan:
            steer(observer.verdict)  # it was not there when that was said

    def forget(self, teller: object) -> None:
        for cast, (_, tellers) in list(self._casts.items()):
            if tellers.pop(teller, None) is not None and not tellers:
                del self._casts[cast]
