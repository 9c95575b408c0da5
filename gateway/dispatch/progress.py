"""How far the starts are that calls wait for: from the feed, and closer from starts driven here."""

from gateway.contract import WAITS_FOR_NODE, Stage
from gateway.directory import Directory, VersionKey
from registry.instance import InstanceState

QUEUE = Stage(stage="queue", fraction=0.0)
NO_NODE = Stage(stage=WAITS_FOR_NODE, fraction=0.0)
_STAGES = {InstanceState.STARTING: "start", InstanceState.LOADING: "load"}


class StartProgress:
    """`note` and `forget` are the controller's; `stage` is what a waiting call is told."""

    def __init__(self) -> None:
        self._noted: dict[VersionKey, dict[str, Stage]] = {}

    def __repr__(self) -> str:
        return f"<StartProgress {sum(map(len, self._noted.values()))} starts>"

    def note(self, key: VersionKey, instance_id: str, stage: str, fraction: float) -> None:
        self._noted.setdefault(key, {})[instance_id] = Stage(stage=stage, fraction=round(fraction, 2))

    def forget(self, key: VersionKey, instance_id: str) -> None:
        noted = self._noted.get(key, {})
        noted.pop(instance_id, None)
        if not noted:
            self._noted.pop(key, None)

    def stage(self, directory: Directory, key: VersionKey) -> Stage:
        """The furthest start of this version; `queue` or `no-node` when none is under way."""
        noted = self._noted.get(key)
        if noted:
            return max(noted.values(), key=lambda stage: stage.fraction)
        coming = directory.coming(key)
        if not coming:
            return QUEUE if any(True for _ in directory.usable_nodes()) else NO_NODE
        best = max(coming, key=lambda instance: instance.progress)
        return Stage(stage=_STAGES[best.state], fraction=round(best.progress, 2))
