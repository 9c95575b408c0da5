"""A span, and the seam to what exports it.

Spans are made when they are over, from records that exist anyway, with explicit times: nothing is kept for
them meanwhile but their ids.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from registry.tracing.context import SpanContext

AttributeValue = str | int | float | bool | Sequence[str]


class SpanKind(StrEnum):
    """The place of a span in a call, as OpenTelemetry names it."""

    INTERNAL = "internal"
    CLIENT = "client"  # the caller's side of a call to another process
    SERVER = "server"  # the side of the process that is called


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanRecord:
    """A span that is over. Times are Unix seconds.

    `parent` is the span that it is part of (None: the first of its trace), `links` are those of other traces
    that it waited for. An `error` says why it failed.
    """

    name: str
    context: SpanContext
    parent: SpanContext | None
    started_at: float
    ended_at: float
    kind: SpanKind = SpanKind.INTERNAL
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    links: Sequence[SpanContext] = ()
    error: str = ""


def phase_spans(
    phases_ms: Mapping[str, float], parent: SpanContext, ended_at: float, *, not_before: float
) -> Iterator[SpanRecord]:
    """Yield the spans of a start's phases, which follow each other up to `ended_at`."""
    at = ended_at - sum(phases_ms.values()) / 1000
    for phase, duration_ms in phases_ms.items():
        since, at = at, at + duration_ms / 1000
        if at > not_before:
            yield SpanRecord(
                name=phase,
                context=parent.child(),
                parent=parent,
                started_at=max(since, not_before),
                ended_at=at,
            )


class Tracer(Protocol):
    """A process's exporter of spans. What has no tracer records no spans."""

    def record(self, span: SpanRecord) -> None:
        """Export a span soon. Any thread may call it; it neither waits nor raises.

        A full queue drops the oldest spans.
        """
        ...

    async def aclose(self) -> None:
        """Export what is queued, within a few seconds. Spans that come later are dropped. Idempotent."""
        ...


class RecordedSpans:
    """A tracer that keeps its spans: the fake of tests."""

    def __init__(self) -> None:
        self.spans: list[SpanRecord] = []

    def __repr__(self) -> str:
        return f"<RecordedSpans {[span.name for span in self.spans]}>"

    def record(self, span: SpanRecord) -> None:
        self.spans.append(span)

    async def aclose(self) -> None:
        return None
