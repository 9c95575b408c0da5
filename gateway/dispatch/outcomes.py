"""How a try of a call ends on a replica, and how failures are reported. Pure."""

from collections.abc import Mapping
from enum import Enum

from gateway.core.contract import DispatchError, Work
from registry.errors import RemoteError
from registry.messages.forward import ForwardedChunk
from registry.messages.node import Compute, Generate, RequestUsage


class ReplicaOutcome(Enum):
    """Why a replica did not complete a call, so that it is routed again."""

    LOST = "lost"  # the channel to its node broke
    DRAINING = "draining"  # admits no new calls
    GONE = "gone"  # no such instance
    FULL = "full"  # no free slot
    STAGE_LOST = "stage lost"  # another node of the pipeline failed
    MOVED = "moved"  # handed off: by a pipeline, on request or because it ends, or by a prefill instance


REFUSALS: Mapping[str, ReplicaOutcome] = {
    "draining": ReplicaOutcome.DRAINING,
    "no_such_instance": ReplicaOutcome.GONE,
    "overloaded": ReplicaOutcome.FULL,
    "no_tokenizer": ReplicaOutcome.FULL,  # it has dropped it: it is sent again
    "no_such_pipeline": ReplicaOutcome.GONE,
    "pipeline_lost": ReplicaOutcome.STAGE_LOST,
}
MAYBE_STARTED = frozenset(
    {ReplicaOutcome.DRAINING, ReplicaOutcome.STAGE_LOST}
)  # the replica may have started the work
_ERRORS = {
    "start_failed": ("start_failed", 503),
    "out_of_memory": ("bad_request", 400),
    "bad_request": ("bad_request", 400),
    "handler_error": ("function_error", 500),
    "handler_not_allowed": ("start_failed", 503),
    "draining": ("draining", 503),
    "overloaded": ("overloaded", 503),
}


def translated(error: RemoteError, request_id: str) -> DispatchError:
    """Return what the caller of a request gets for an error of a node."""
    code, status = _ERRORS.get(error.code, ("internal", 500))
    message = error.message
    if error.code == "handler_error":  # the function's log has the rest, under this id
        message += f" (request {request_id.partition('/')[0]})"
    return DispatchError(code, message, status=status, retry_after_s=5 if status == 503 else None)


def given_up(error: Exception, request_id: str) -> DispatchError:
    """Return the error of a call that was tried too often."""
    if isinstance(error, RemoteError):
        return translated(error, request_id)
    return DispatchError("internal", f"the call was retried too often; last error: {error}", status=500)


def whole_usage(
    work: Work, last: RequestUsage | ForwardedChunk | None, *, tokens: int, gpu_us: int, exec_us: int
) -> RequestUsage:
    """Return the usage of a whole call, from what was seen of it and the report of its last node, if any."""
    prompt = completion = 0
    if last is not None:
        prompt, completion = last.prompt_tokens, last.completion_tokens
    match work:
        case Generate(prompt_ids=ids):
            prompt, completion = len(ids), tokens
        case Compute(token_ids=texts) if last is None:
            prompt = sum(map(len, texts))
        case _:
            pass
    return RequestUsage(prompt_tokens=prompt, completion_tokens=completion, gpu_us=gpu_us, exec_us=exec_us)
