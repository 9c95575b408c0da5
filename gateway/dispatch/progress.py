"""The progress of starts that calls wait for, from the change feed and from starts made here."""

from gateway.cluster.state_cache import ClusterStateCache, VersionKey
from gateway.core.contract import WAITS_FOR_NODE, WaitStage
from registry.records.instance import InstanceState

QUEUE = WaitStage(stage="queue", fraction=0.0)
NO_NODE = WaitStage(stage=WAITS_FOR_NODE, fraction=0.0)
_STAGES = {InstanceState.STARTING: "start", InstanceState.LOADING: "load"}


class StartProgress:
    """The progress of starts: written by the controller, reported to waiting calls by `stage`."""

    def __init__(self) -> None:
        self._noted: dict[VersionKey, dict[str, WaitStage]] = {}

    def __repr__(self) -> str:
        return f"<StartProgress {sum(map(len, self._noted.values()))} starts>"

    def note(self, key: VersionKey, instance_id: str, stage: str, fraction: float) -> None:
        self._noted.setdefault(key, {})[instance_id] = WaitStage(stage=stage, fraction=round(fraction, 2))

    def forget(self, key: VersionKey, instance_id: str) -> None:
        noted = self._noted.get(key, {})
        noted.pop(instance_id, None)
        if not noted:
            self._noted.pop(key, None)

    def stage(self, state_cache: ClusterStateCache, key: VersionKey) -> WaitStage:
        """Return the stage of the most advanced start of this version; `queue` or `no-node` without one."""
        noted = self._noted.get(key)
        if noted:
            return max(noted.values(), key=lambda stage: stage.fraction)
        coming = state_cache.starting(key)
        if not coming:
            return QUEUE if any(True for _ in state_cache.usable_nodes()) else NO_NODE
        best = max(coming, key=lambda instance: instance.progress)
        return WaitStage(stage=_STAGES[best.state], fraction=round(best.progress, 2))
