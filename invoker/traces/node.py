"""The traces of one node: what makes spans of its calls, stages, starts and casts."""

from collections.abc import AsyncGenerator, Callable

from invoker.traces.calls import Work, traced, with_trace
from invoker.traces.stages import StageSpans
from invoker.traces.starts import StartSpans
from registry.clock import Clock
from registry.messages.node import Reply
from registry.tracing.context import parse_message
from registry.tracing.span import AttributeValue, Tracer


class NodeTracing:
    """Makes the spans of a node. There is none on a node that exports no traces."""

    def __init__(self, tracer: Tracer, clock: Clock) -> None:
        self._tracer = tracer
        self._clock = clock
        self.starts = StartSpans(tracer)

    def __repr__(self) -> str:
        return f"<NodeTracing by {self._tracer!r}>"

    def call(
        self, request: Work, run: Callable[[Work], AsyncGenerator[Reply, None]]
    ) -> AsyncGenerator[Reply, None]:
        """Return the replies to a request, whose spans are recorded if it is traced."""
        parent = parse_message(request.trace)
        if parent is None:
            return run(request)
        place = parent.child()
        replies = run(with_trace(request, place))
        return traced(replies, request, place, parent, self._tracer, self._clock)

    def stage(self, name: str, attributes: dict[str, AttributeValue]) -> StageSpans:
        """Return the spans of a stage, which has these attributes."""
        return StageSpans(self._tracer, self._clock.wall_s, name, attributes)
