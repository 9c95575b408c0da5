"""Replanning around slow nodes: which detector a node reports to, and its order after a verdict (pure)."""

from rdmacast.cast.pull_log import PullLog
from rdmacast.cast.spec import CastSpec
from rdmacast.plan.planners.own_part import Order
from rdmacast.protocol.pull_report import PullReport, StragglerVerdict
from rdmacast.stragglers.detector import MIN_MEMBERS, report_interval_s


class Replanner:
    """The replanner of one node in one cast; the first source that is not lost is the detector."""

    def __init__(self, spec: CastSpec, node: int) -> None:
        self._spec = spec
        self._node = node
        plan = spec.plan
        detected = len(plan.members) >= MIN_MEMBERS and node not in plan.sources and not spec.is_pull
        self._detector_nodes = list(plan.sources) if detected else []
        self._verdict = StragglerVerdict(plan=0, slow=plan.edge)
        self.log = PullLog(plan.cast_id, node, spec.block_s)

    def __repr__(self) -> str:
        return f"Replanner({self._verdict}, observers {self._detector_nodes})"

    @property
    def detector(self) -> int | None:
        """The node that reports are sent to; None if there is none, or none is left."""
        return self._detector_nodes[0] if self._detector_nodes else None

    @property
    def report_interval_s(self) -> float:
        return report_interval_s(len(self._spec.plan.members))

    @property
    def verdict(self) -> StragglerVerdict:
        """The verdict of the plan that this node follows."""
        return self._verdict

    def on_peer_lost(self, peer: int) -> None:
        if peer in self._detector_nodes:
            self._detector_nodes.remove(peer)

    def report(self, now_s: float) -> PullReport:
        return self.log.report(self._verdict.plan, self._verdict.slow, now_s)

    def on_verdict(self, verdict: StragglerVerdict) -> Order | None:
        """Return this node's part of the new plan; None if the verdict is old or leads to no plan."""
        if verdict.plan <= self._verdict.plan:
            return None
        self._verdict = verdict
        return self._spec.order(self._node, verdict.slow)
