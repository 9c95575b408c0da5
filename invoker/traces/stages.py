"""The spans of a stage of a pipeline: one for each sequence that it runs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from registry.messages.trace import TraceContext
from registry.tracing.context import SpanContext, parse_message
from registry.tracing.span import AttributeValue, SpanRecord, Tracer


@dataclass(slots=True)
class _TracedSequence:
    """A sequence whose span is open; `busy_s` are the steps that it took part in."""

    parent: SpanContext
    call_id: str
    started_at: float
    busy_s: float = 0.0
    steps: int = 0


class StageSpans:
    """The traced sequences of one stage. Belongs to the thread that runs its steps.

    A span reaches from a sequence's first step here to the one that drops it. `attributes` are the stage's.
    """

    def __init__(
        self, tracer: Tracer, wall_s: Callable[[], float], name: str, attributes: Mapping[str, AttributeValue]
    ) -> None:
        self._tracer = tracer
        self._wall_s = wall_s
        self._name = name
        self._attributes = attributes
        self.open: dict[str, _TracedSequence] = {}

    def __repr__(self) -> str:
        return f"<StageSpans of {self._name}: {len(self.open)} sequences>"

    def enter(self, sequence: str, call_id: str, trace: TraceContext | None) -> None:
        """Open the span of a sequence if it is traced, until `release`."""
        parent = parse_message(trace)
        if parent is not None:
            self.open[sequence] = _TracedSequence(parent, call_id, self._wall_s())

    def add_step(self, sequence: str, seconds: float) -> None:
        """Count a step of a sequence."""
        found = self.open.get(sequence)
        if found is not None:
            found.busy_s += seconds
            found.steps += 1

    def release(self, sequence: str) -> None:
        """Record the span of a sequence, if it is traced."""
        found = self.open.pop(sequence, None)
        if found is None:
            return
        more: dict[str, AttributeValue] = {
            "hypercast.call_id": found.call_id,
            "hypercast.steps": found.steps,
            "hypercast.busy_ms": round(found.busy_s * 1000, 3),
        }
        self._tracer.record(
            SpanRecord(
                name=self._name,
                context=found.parent.child(),
                parent=found.parent,
                started_at=found.started_at,
                ended_at=self._wall_s(),
                attributes={**self._attributes, **more},
            )
        )
