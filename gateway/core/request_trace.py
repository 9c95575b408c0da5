"""The trace of a request: whether it has one, and the places of its spans."""

from collections.abc import Callable
from dataclasses import dataclass

from registry.tracing.context import CallerTrace, SpanContext, new_trace, parse_trace
from registry.tracing.sampling import TraceSampler
from registry.tracing.settings import TracingSettings
from registry.tracing.span import Tracer


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """The trace of one request. `own` is the place of its own span, which is named by its `route`."""

    tracer: Tracer
    route: str
    own: SpanContext
    parent: SpanContext | None


class RequestTracing:
    """Begins the traces of requests, for those that are sampled."""

    def __init__(self, tracer: Tracer, settings: TracingSettings, now_s: Callable[[], float]) -> None:
        self.tracer = tracer
        self._sampler = TraceSampler(settings.share, settings.rate, now_s)

    def __repr__(self) -> str:
        return f"<RequestTracing {self._sampler!r} by {self.tracer!r}>"

    def begin(self, caller: CallerTrace | None, route: str) -> RequestTrace | None:
        """Return the trace of a request, which continues that of its caller, if it is to be traced."""
        if not self._sampler.takes(None if caller is None else caller.sampled):
            return None
        parent = None if caller is None else caller.context
        return RequestTrace(self.tracer, route, new_trace() if parent is None else parent.child(), parent)


def caller_trace(headers: dict[bytes, bytes]) -> CallerTrace | None:
    """Return what the headers `traceparent` and `tracestate` say, if there is a valid one."""
    parent = headers.get(b"traceparent")
    if parent is None:
        return None
    state = headers.get(b"tracestate", b"")
    return parse_trace(parent.decode("latin-1"), state.decode("latin-1"))
