"""How a node of a cast is steered around slow ones: whom it tells of its pulls, and what follows (pure)."""

from rdmacast.cast_spec import CastSpec
from rdmacast.observer import LEAST_MEMBERS, report_every_s
from rdmacast.planners.own_part import Order
from rdmacast.pull_log import PullLog
from rdmacast.pull_report import PullReport, Verdict


class Steering:
    """Of one node in one cast. The sources are its observers: the first that is not lost is told."""

    def __init__(self, spec: CastSpec, node: int) -> None:
        self._spec = spec
        self._node = node
        observed = len(spec.members) >= LEAST_MEMBERS and node not in spec.sources
        self._observers = list(spec.sources) if observed else []
        self._verdict = Verdict(plan=0, slow=spec.edge)
        self.log = PullLog(spec.cast, node, spec.block_s)

    def __repr__(self) -> str:
        return f"Steering({self._verdict}, observers {self._observers})"

    @property
    def observer(self) -> int | None:
        """Whom to tell; None where nobody is, or is left."""
        return self._observers[0] if self._observers else None

    @property
    def every_s(self) -> float:
        return report_every_s(len(self._spec.members))

    @property
    def verdict(self) -> Verdict:
        """Whose plan this node goes by."""
        return self._verdict

    def lost(self, peer: int) -> None:
        if peer in self._observers:
            self._observers.remove(peer)

    def report(self, now_s: float) -> PullReport:
        return self.log.report(self._verdict.plan, self._verdict.slow, now_s)

    def steered(self, verdict: Verdict) -> Order | None:
        """This node's part of the new plan, if the verdict is one and a plan follows from it."""
        if verdict.plan <= self._verdict.plan:
            return None
        self._verdict = verdict
        return self._spec.order(self._node, verdict.slow)
