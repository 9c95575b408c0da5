"""The life cycle of an instance as an immutable value: transitions and phase durations."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from registry.messages.node import StartInstance
from registry.records.engine import EngineKind
from registry.records.instance import InstanceRecord, InstanceState, StartKind, check_transition

PHASES = ("reserve", "fetch", "copy", "bind", "ready")
FINAL = frozenset({InstanceState.STOPPED, InstanceState.FAILED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifecycle:
    """The state of an instance's life cycle, with the record that the node publishes of it.

    Methods return the next value. Phases are contiguous, so their durations add up to the time from
    acceptance to readiness. A phase may be skipped (the fetch of a hot start).
    """

    record: InstanceRecord
    phase: str
    phase_started_s: float

    @property
    def state(self) -> InstanceState:
        return self.record.state

    @property
    def final(self) -> bool:
        return self.state in FINAL

    def with_source(self, start_kind: StartKind, source: str) -> "Lifecycle":
        """Set the kind and source of the start (again when another source takes over)."""
        return self._with(start_kind=start_kind, source=source)

    def with_phase(self, phase: str, now_s: float) -> "Lifecycle":
        """End the current phase at monotonic time `now_s` and start `phase`.

        Raises ValueError unless it is later.
        """
        if PHASES.index(phase) <= PHASES.index(self.phase):
            raise ValueError(f"phase {phase} cannot follow {self.phase}")
        ended = self._with(phases_ms=self._closed(now_s), progress=0.0)
        return replace(ended, phase=phase, phase_started_s=now_s)

    def with_progress(self, fraction: float) -> "Lifecycle":
        """Set the progress of the phase, which never decreases."""
        return self._with(progress=max(self.record.progress, min(1.0, fraction)))

    def with_state(self, state: InstanceState, wall_s: float, *, error: str = "") -> "Lifecycle":
        """Change the state at Unix time `wall_s`. Raises InvalidRecord if there is no such transition."""
        return self._with(state=check_transition(self.state, state), since=wall_s, error=error)

    def with_engine(self, engine: EngineKind) -> "Lifecycle":
        """Record which engine serves its calls from now on."""
        return self._with(engine=engine)

    def without_room(self) -> "Lifecycle":
        """Record that the arena had no room for the start."""
        return self._with(no_room=True)

    def ready(self, wall_s: float, now_s: float, kv_tokens: int = 0) -> "Lifecycle":
        """End the last phase and change the state to READY."""
        done = self._with(phases_ms=self._closed(now_s), progress=1.0, kv_tokens=kv_tokens)
        return done.with_state(InstanceState.READY, wall_s)

    def _with(self, **changes: Any) -> "Lifecycle":
        return replace(self, record=replace(self.record, **changes))

    def _closed(self, now_s: float) -> Mapping[str, float]:
        duration_ms = round((now_s - self.phase_started_s) * 1e3, 3)
        return {**self.record.phases_ms, self.phase: duration_ms}


def accepted(request: StartInstance, node: str, *, wall_s: float, now_s: float) -> Lifecycle:
    """Return the life cycle of an instance that a node has just accepted: STARTING, in its first phase."""
    record = InstanceRecord(
        instance_id=request.instance_id,
        function=request.function,
        version=request.version,
        node=node,
        max_concurrency=request.max_concurrency,
        state=InstanceState.STARTING,
        start_kind=StartKind.COLD,
        since=wall_s,
        engine=EngineKind.NATIVE if request.native_first else request.engine,
        group=request.group,
    )
    return Lifecycle(record=record, phase=PHASES[0], phase_started_s=now_s)
