"""The export of spans by OTLP over HTTP, with the SDK of OpenTelemetry (the extra `otel`).

The SDK has the queue, its thread and the exporter; its settings are the `OTEL_…` variables, such as
`OTEL_EXPORTER_OTLP_HEADERS`. Its own spans are not used: they want a context that is current on a thread, and
cost several times as much as these records.
"""

import asyncio
from contextlib import suppress
from importlib.metadata import version
from typing import TYPE_CHECKING

from rdmacast.aio.threads import run_in_daemon_thread
from registry.errors import InvalidRecord
from registry.tracing.context import SpanContext
from registry.tracing.settings import TracingSettings
from registry.tracing.span import SpanKind, SpanRecord, Tracer

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanProcessor
    from opentelemetry.trace import SpanContext as OtelContext

CLOSE_S = 3.0  # for the export of what is queued at the end


def open_tracer(settings: TracingSettings, service: str, instance: str) -> Tracer | None:
    """Return the tracer of this process, None if spans go nowhere. Raises InvalidRecord without the extra.

    It starts a thread, so that it must not be called before a fork.
    """
    return None if settings.url is None else OtlpTracer(settings.url, service, instance)


class OtlpTracer:
    """A tracer with the SDK's batch processor: spans that its queue cannot hold are dropped, and logged."""

    def __init__(self, url: str, service: str, instance: str, *, close_s: float = CLOSE_S) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import ReadableSpan
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.util.instrumentation import InstrumentationScope
            from opentelemetry.trace.status import Status, StatusCode
        except ImportError as error:
            raise InvalidRecord(
                f"--otlp-endpoint needs OpenTelemetry: pip install 'hypercast[otel]' ({error})"
            ) from error
        released = version("hypercast")
        self._trace = trace
        self._make_span = ReadableSpan
        self._ok, self._failed = Status(StatusCode.UNSET), StatusCode.ERROR
        self._make_status = Status
        self._scope = InstrumentationScope("hypercast", released)
        self._resource: Resource = Resource.create(
            {
                "service.name": service,
                "service.namespace": "hypercast",
                "service.instance.id": instance,
                "service.version": released,
            }
        )
        self._kinds = {
            SpanKind.INTERNAL: trace.SpanKind.INTERNAL,
            SpanKind.CLIENT: trace.SpanKind.CLIENT,
            SpanKind.SERVER: trace.SpanKind.SERVER,
        }
        self._processor: SpanProcessor = BatchSpanProcessor(OTLPSpanExporter(endpoint=url))
        self._url = url
        self._close_s = close_s
        self._closed = False

    def __repr__(self) -> str:
        return f"<OtlpTracer {self._url}{' closed' if self._closed else ''}>"

    def record(self, span: SpanRecord) -> None:
        """See Tracer."""
        if self._closed:
            return
        parent, is_remote = span.parent, span.kind is SpanKind.SERVER
        self._processor.on_end(
            self._make_span(
                span.name,
                context=self._context(span.context, is_remote=False),
                parent=None if parent is None else self._context(parent, is_remote=is_remote),
                resource=self._resource,
                attributes=dict(span.attributes),
                links=[self._trace.Link(self._context(one, is_remote=True)) for one in span.links],
                kind=self._kinds[span.kind],
                status=self._make_status(self._failed, span.error) if span.error else self._ok,
                start_time=_nanoseconds(span.started_at),
                end_time=_nanoseconds(max(span.started_at, span.ended_at)),
                instrumentation_scope=self._scope,
            )
        )

    async def aclose(self) -> None:
        """See Tracer."""
        if self._closed:
            return
        self._closed = True
        with suppress(TimeoutError):  # the thread does not delay the end of the process
            async with asyncio.timeout(self._close_s):
                await run_in_daemon_thread(self._processor.shutdown)

    def _context(self, context: SpanContext, *, is_remote: bool) -> "OtelContext":
        state = self._trace.TraceState.from_header([context.state]) if context.state else None
        return self._trace.SpanContext(
            context.trace_id,
            context.span_id,
            is_remote=is_remote,
            trace_flags=self._trace.TraceFlags(self._trace.TraceFlags.SAMPLED),
            trace_state=state,
        )


def _nanoseconds(at: float) -> int:
    """Return Unix seconds in nanoseconds; they are exact to a microsecond."""
    return round(at * 1e6) * 1000
