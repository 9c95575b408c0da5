"""The life cycle of one instance as a value: which step may follow, and how long each phase took."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from registry.instance import InstanceRecord, InstanceState, StartKind, check_transition

PHASES = ("reserve", "fetch", "copy", "bind", "ready")
FINAL = frozenset({InstanceState.STOPPED, InstanceState.FAILED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifecycle:
    """What is known of an instance's life so far; each method returns the next value.

    Phases follow each other without a gap, so their lengths add up to the time from acceptance to
    readiness. A phase that an instance has no use for (the fetch of a hot start) is skipped.
    """

    instance_id: str
    function: str
    version: int
    node: str
    max_concurrency: int
    state: InstanceState
    since: float
    phase: str
    phase_began_s: float
    start_kind: StartKind = StartKind.COLD
    source: str = ""
    progress: float = 0.0
    phases_ms: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    error: str = ""
    no_room: bool = False

    @property
    def final(self) -> bool:
        return self.state in FINAL

    def planned(self, start_kind: StartKind, source: str) -> "Lifecycle":
        """Note from where the start is made (again when a source failed and another took over)."""
        return replace(self, start_kind=start_kind, source=source)

    def entered(self, phase: str, now_s: float) -> "Lifecycle":
        """End the current phase at monotonic `now_s` and begin `phase`, which must be a later one."""
        if PHASES.index(phase) <= PHASES.index(self.phase):
            raise ValueError(f"phase {phase} cannot follow {self.phase}")
        return replace(self, phases_ms=self._closed(now_s), phase=phase, phase_began_s=now_s, progress=0.0)

    def progressed(self, fraction: float) -> "Lifecycle":
        """The share of the phase that is done; it never goes back."""
        return replace(self, progress=max(self.progress, min(1.0, fraction)))

    def moved(self, state: InstanceState, wall_s: float, *, error: str = "") -> "Lifecycle":
        """Take a step of the transition table at Unix time `wall_s`. Raises InvalidRecord."""
        return replace(self, state=check_transition(self.state, state), since=wall_s, error=error)

    def lacked_room(self) -> "Lifecycle":
        """Note that the arena had no room for the start."""
        return replace(self, no_room=True)

    def ready(self, wall_s: float, now_s: float) -> "Lifecycle":
        """The instance serves: the last phase ends here."""
        done = replace(self, phases_ms=self._closed(now_s), progress=1.0)
        return done.moved(InstanceState.READY, wall_s)

    def record(self) -> InstanceRecord:
        """What the node publishes."""
        return InstanceRecord(
            instance_id=self.instance_id,
            function=self.function,
            version=self.version,
            node=self.node,
            state=self.state,
            start_kind=self.start_kind,
            since=self.since,
            source=self.source,
            progress=self.progress,
            phases_ms=dict(self.phases_ms),
            error=self.error,
            no_room=self.no_room,
            max_concurrency=self.max_concurrency,
        )

    def _closed(self, now_s: float) -> Mapping[str, float]:
        length_ms = round((now_s - self.phase_began_s) * 1e3, 3)
        return MappingProxyType({**self.phases_ms, self.phase: length_ms})


def accepted(
    instance_id: str,
    function: str,
    version: int,
    node: str,
    max_concurrency: int,
    *,
    wall_s: float,
    now_s: float,
) -> Lifecycle:
    """An instance that a node has just accepted: STARTING, in its first phase."""
    return Lifecycle(
        instance_id=instance_id,
        function=function,
        version=version,
        node=node,
        max_concurrency=max_concurrency,
        state=InstanceState.STARTING,
        since=wall_s,
        phase=PHASES[0],
        phase_began_s=now_s,
    )
