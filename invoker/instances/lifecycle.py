"""The life cycle of an instance as an immutable value: transitions and phase durations."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from registry.records.instance import InstanceRecord, InstanceState, StartKind, check_transition

PHASES = ("reserve", "fetch", "copy", "bind", "ready")
FINAL = frozenset({InstanceState.STOPPED, InstanceState.FAILED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifecycle:
    """The state of an instance's life cycle; methods return the next value.

    Phases are contiguous, so their durations add up to the time from acceptance to readiness. A phase may be
    skipped (the fetch of a hot start).
    """

    instance_id: str
    function: str
    version: int
    node: str
    max_concurrency: int
    state: InstanceState
    since: float
    phase: str
    phase_started_s: float
    start_kind: StartKind = StartKind.COLD
    source: str = ""
    progress: float = 0.0
    phases_ms: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    error: str = ""
    no_room: bool = False

    @property
    def final(self) -> bool:
        return self.state in FINAL

    def with_source(self, start_kind: StartKind, source: str) -> "Lifecycle":
        """Set the kind and source of the start (again when another source takes over)."""
        return replace(self, start_kind=start_kind, source=source)

    def with_phase(self, phase: str, now_s: float) -> "Lifecycle":
        """End the current phase at monotonic time `now_s` and start `phase`.

        Raises ValueError unless it is later.
        """
        if PHASES.index(phase) <= PHASES.index(self.phase):
            raise ValueError(f"phase {phase} cannot follow {self.phase}")
        return replace(self, phases_ms=self._closed(now_s), phase=phase, phase_started_s=now_s, progress=0.0)

    def with_progress(self, fraction: float) -> "Lifecycle":
        """Set the progress of the phase, which never decreases."""
        return replace(self, progress=max(self.progress, min(1.0, fraction)))

    def with_state(self, state: InstanceState, wall_s: float, *, error: str = "") -> "Lifecycle":
        """Change the state at Unix time `wall_s`. Raises InvalidRecord if there is no such transition."""
        return replace(self, state=check_transition(self.state, state), since=wall_s, error=error)

    def without_room(self) -> "Lifecycle":
        """Record that the arena had no room for the start."""
        return replace(self, no_room=True)

    def ready(self, wall_s: float, now_s: float) -> "Lifecycle":
        """End the last phase and change the state to READY."""
        done = replace(self, phases_ms=self._closed(now_s), progress=1.0)
        return done.with_state(InstanceState.READY, wall_s)

    def record(self) -> InstanceRecord:
        """Return the record that the node publishes."""
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
        duration_ms = round((now_s - self.phase_started_s) * 1e3, 3)
        return MappingProxyType({**self.phases_ms, self.phase: duration_ms})


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
    """Return the life cycle of an instance that a node has just accepted: STARTING, in its first phase."""
    return Lifecycle(
        instance_id=instance_id,
        function=function,
        version=version,
        node=node,
        max_concurrency=max_concurrency,
        state=InstanceState.STARTING,
        since=wall_s,
        phase=PHASES[0],
        phase_started_s=now_s,
    )
