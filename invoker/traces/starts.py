"""The spans of starts and of a node's parts in casts, made of the records that it publishes of them.

| span | of | from | to |
|---|---|---|---|
| `start FUNCTION` | the trace of the start | the node accepts it | it is ready, or failed |
| `reserve`, `fetch`, `copy`, `bind`, `ready` | the same | | the phases that it went through |
| `cast part` | the trace of the cast | the node joins the cast | it has the image, or failed |

Other processes find these traces by the ids of instance and cast (`named_trace`).
"""

from collections.abc import Callable

from registry.messages.node import StartInstance
from registry.records.cast import CastProgress, CastState
from registry.records.instance import InstanceRecord, InstanceState
from registry.tracing.context import named_trace
from registry.tracing.span import AttributeValue, SpanRecord, Tracer, phase_spans

_STARTING = frozenset({InstanceState.STARTING, InstanceState.LOADING})
_MAX_STARTS = 1024  # whose cast is remembered: more than run at once


class StartSpans:
    """Records the spans of starts and casts. Belongs to the event loop's thread."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._accepted_at: dict[str, float] = {}  # of starts in progress
        self._casts: dict[str, str] = {}  # the cast of a start, by instance

    def __repr__(self) -> str:
        return f"<StartSpans of {list(self._accepted_at)}>"

    def note_request(self, request: StartInstance) -> None:
        """Remember the cast that brings an instance's image."""
        if request.image is not None and request.image.cast is not None:
            self._casts[request.instance_id] = request.image.cast.cast_id
            if len(self._casts) > _MAX_STARTS:
                del self._casts[next(iter(self._casts))]

    def watched(self, publish: Callable[[InstanceRecord], None]) -> Callable[[InstanceRecord], None]:
        """Return what publishes an instance's record and records its start."""

        def both(record: InstanceRecord) -> None:
            self._note(record)
            publish(record)

        return both

    def watched_casts(self, publish: Callable[[CastProgress], None]) -> Callable[[CastProgress], None]:
        """Return what publishes the progress of a cast and records its end."""

        def both(progress: CastProgress) -> None:
            if progress.is_final:
                self._tracer.record(cast_part(progress))
            publish(progress)

        return both

    def _note(self, record: InstanceRecord) -> None:
        if record.state in _STARTING:
            self._accepted_at.setdefault(record.instance_id, record.since)
            return
        accepted_at = self._accepted_at.pop(record.instance_id, None)
        if accepted_at is None:
            return  # it was ready before
        cast = self._casts.pop(record.instance_id, "")
        context = named_trace("start", record.instance_id)
        attributes: dict[str, AttributeValue] = {
            "hypercast.instance": record.instance_id,
            "hypercast.function": record.function,
            "hypercast.version": record.version,
            "hypercast.start_kind": record.start_kind,
            "hypercast.source": record.source,
            "hypercast.engine": record.engine,
        }
        if record.state is InstanceState.STOPPED:
            attributes["hypercast.cancelled"] = True
        self._tracer.record(
            SpanRecord(
                name=f"start {record.function}",
                context=context,
                parent=None,
                started_at=accepted_at,
                ended_at=record.since,
                attributes=attributes,
                links=[named_trace("cast", cast)] if cast else (),
                error=record.error if record.state is InstanceState.FAILED else "",
            )
        )
        phases_ms = record.phases_ms
        ended_at = accepted_at + sum(phases_ms.values()) / 1000
        for span in phase_spans(phases_ms, context, ended_at, not_before=accepted_at):
            self._tracer.record(span)


def cast_part(progress: CastProgress) -> SpanRecord:
    """Return the span of a node's part in a cast, from its final report."""
    cast = named_trace("cast", progress.cast_id)
    attributes: dict[str, AttributeValue] = {
        "hypercast.cast": progress.cast_id,
        "hypercast.blocks": progress.blocks,
        "hypercast.held": progress.held,
        "hypercast.state": progress.state,
    }
    attributes |= {f"hypercast.received.{one}": nbytes for one, nbytes in progress.received.items()}
    attributes |= {f"hypercast.pulls.{kind}": count for kind, count in progress.faults.items()}
    if progress.pulled:
        attributes["hypercast.peers"] = list(progress.pulled)
    return SpanRecord(
        name="cast part",
        context=cast.child(),
        parent=cast,
        started_at=progress.updated_at - progress.seconds,
        ended_at=progress.updated_at,
        attributes=attributes,
        error=progress.error if progress.state is CastState.FAILED else "",
    )
