"""The spans of a request, made once it is over from what is known of it then (pure).

| span | from | to |
|---|---|---|
| `POST /v1/…` | its arrival | the end of its response |
| `chat MODEL`, … | the begin of a call | its end |
| `place` | the begin of the call | a node has accepted the start that the call waited for |
| `reserve`, `fetch`, `copy`, `bind`, `ready` | the phases of that start, as far as the call waited for them |
| `queue` | an instance is ready | it gets the call |

Nodes make spans of what they run for the call, in the same trace, and of their starts, in another one
(`named_trace`), to which `place` has a link.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from gateway.cluster.cast_tracker import CastEnded
from gateway.core.contract import Assigned, Work
from gateway.core.open_call import OpenCall
from gateway.core.request_context import RequestContext
from gateway.core.request_trace import RequestTrace
from registry.messages.node import Compute, Generate, InvokeHandler
from registry.messages.sampling import Sampling
from registry.records.cast import CastState
from registry.tracing.context import SpanContext, named_trace
from registry.tracing.span import AttributeValue, SpanKind, SpanRecord, phase_spans

PROVIDER = "hypercast"  # of `gen_ai.provider.name`

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/embeddings": "embeddings",
}
_MIN_WAIT_MS = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRequest:
    """A request that is over, as HTTP sees it. Times are Unix seconds."""

    method: str
    path: str
    status: int
    ended_at: float


def request_span(context: RequestContext, trace: RequestTrace, served: ServedRequest) -> SpanRecord:
    """Return the span of the request itself."""
    attributes: dict[str, AttributeValue] = {
        "http.request.method": served.method,
        "http.route": trace.route,
        "url.path": served.path,
        "http.response.status_code": served.status,
        "hypercast.request_id": context.request_id,
    }
    if served.status >= 400:
        attributes["error.type"] = context.error_code or str(served.status)
    named = {
        "hypercast.client_request_id": context.client_request_id,
        "hypercast.tenant": context.key.tenant if context.key else "",
        "hypercast.key_id": context.key.id if context.key else "",
        "hypercast.function": context.function,
        "hypercast.start_kind": context.start_kind,
    }
    attributes |= {name: value for name, value in named.items() if value}
    return SpanRecord(
        name=f"{served.method} {trace.route}",
        context=trace.own,
        parent=trace.parent,
        kind=SpanKind.SERVER,
        started_at=context.received_at,
        ended_at=served.ended_at,
        attributes=attributes,
        error=(context.error_code or str(served.status)) if served.status >= 500 else "",
    )


def call_spans(run: OpenCall, context: RequestContext, trace: RequestTrace) -> Iterator[SpanRecord]:
    """Yield the span of a call that has ended, and those of its waits."""
    call = run.call
    if call.span is None:
        return
    wall_less_monotonic_s = context.received_at - context.received_s
    started_at = max(context.received_at, wall_less_monotonic_s + run.started_s)
    operation = _operation(call.work, trace.route)
    model = call.version.function
    yield SpanRecord(
        name=f"{operation or 'invoke'} {model}",
        context=call.span,
        parent=trace.own,
        kind=SpanKind.CLIENT,
        started_at=started_at,
        ended_at=max(started_at, wall_less_monotonic_s + run.ended_s),
        attributes=_call_attributes(run, operation),
        error="the call failed" if run.failed else "",
    )
    if run.assigned is not None:
        yield from _waits(run, run.assigned, call.span, started_at)


def _waits(run: OpenCall, assigned: Assigned, parent: SpanContext, started_at: float) -> Iterator[SpanRecord]:
    ready_at = started_at + assigned.load_ms / 1000
    if assigned.load_ms > _MIN_WAIT_MS:
        accepted_at = max(started_at, ready_at - sum(assigned.phases_ms.values()) / 1000)
        instances = dict.fromkeys(use.gpu.instance_id for use in run.used)
        if accepted_at > started_at or not assigned.phases_ms:
            yield SpanRecord(
                name="place",
                context=parent.child(),
                parent=parent,
                started_at=started_at,
                ended_at=accepted_at if assigned.phases_ms else ready_at,
                attributes={"hypercast.start_kind": assigned.start_kind, "hypercast.node": assigned.node},
                links=[named_trace("start", instance) for instance in instances],
            )
        yield from phase_spans(assigned.phases_ms, parent, ready_at, not_before=started_at)
    yield SpanRecord(
        name="queue",
        context=parent.child(),
        parent=parent,
        started_at=ready_at,
        ended_at=ready_at + assigned.queue_ms / 1000,
    )


def cast_span(end: CastEnded) -> SpanRecord:
    """Return the span of a whole cast, of which the nodes' parts are children; it has a trace of its own."""
    record = end.record
    return SpanRecord(
        name=f"cast {record.function}",
        context=named_trace("cast", record.cast_id),
        parent=None,
        started_at=record.started_at,
        ended_at=record.started_at + end.seconds,
        attributes={
            "hypercast.cast": record.cast_id,
            "hypercast.function": record.function,
            "hypercast.version": record.version,
            "hypercast.planner": record.planner,
            "hypercast.reason": record.reason,
            "hypercast.bytes": record.nbytes,
            "hypercast.blocks": record.blocks,
            "hypercast.sources": len(record.sources),
            "hypercast.targets": len(record.targets),
        },
        error=f"the cast is {end.state}" if end.state is CastState.FAILED else "",
    )


def _operation(work: Work, route: str) -> str:
    """Return the `gen_ai.operation.name` of a call, "" for what is no such operation."""
    if isinstance(work, Compute):
        return "embeddings" if work.kind == "embed" else ""
    return "" if isinstance(work, InvokeHandler) else _OPERATIONS.get(route, "generate_content")


def _call_attributes(run: OpenCall, operation: str) -> dict[str, AttributeValue]:
    call, usage, assigned = run.call, run.usage, run.assigned
    attributes: dict[str, AttributeValue] = {
        "hypercast.call_id": call.work.request_id,
        "hypercast.function": call.version.function,
        "hypercast.version": call.version.version,
    }
    if operation:
        prompt = usage.prompt_tokens if usage is not None else run.prompt_tokens
        attributes |= {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": call.version.function,
            "gen_ai.response.model": f"{call.version.function}:{call.version.version}",
            "gen_ai.usage.input_tokens": (
                len(call.work.prompt_ids) if isinstance(call.work, Generate) else prompt
            ),
            "gen_ai.usage.output_tokens": usage.completion_tokens if usage is not None else run.tokens,
        }
    if isinstance(call.work, Generate):
        attributes |= _sampling_attributes(call.work.sampling)
    if (first_s := run.first_output_after_s) is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = first_s
    if assigned is not None:
        attributes |= {
            "hypercast.start_kind": assigned.start_kind,
            "hypercast.node": assigned.node,
            "hypercast.instance": assigned.instance_id,
        }
    if uses := run.used:
        attributes["hypercast.gpu_us"] = sum(use.gpu.gpu_us for use in uses)
        attributes["hypercast.tries"] = len({use.gpu.call_id for use in uses})
        attributes["hypercast.nodes"] = list(dict.fromkeys(use.gpu.node for use in uses))
    return attributes


def _sampling_attributes(sampling: Sampling) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.seed": sampling.seed,
    }
    optional = {
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
    }
    return attributes | {name: value for name, value in optional.items() if value}
