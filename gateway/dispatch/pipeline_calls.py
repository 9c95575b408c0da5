"""The calls of this gateway on pipelines, and which of them move when a member is promoted (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.dispatch.targets import UnfinishedRequest, share_of
from registry.messages.node import Generate


class MovableCall(Protocol):
    """A call on a pipeline. `go_to` sets the instance on which it is to continue."""

    @property
    def call_id(self) -> str:
        """Its id on the node."""
        ...

    @property
    def unfinished(self) -> UnfinishedRequest: ...

    def go_to(self, instance_id: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CallHandOff:
    """Calls that a pipeline's head is to hand off."""

    pipeline: str
    call_ids: tuple[str, ...]


class PipelineCalls:
    """The running calls by pipeline; each call adds and removes itself and is on one pipeline at most."""

    def __init__(self) -> None:
        self._calls: dict[str, dict[str, MovableCall]] = {}

    def __repr__(self) -> str:
        return f"<PipelineCalls { {name: len(calls) for name, calls in self._calls.items()} }>"

    @property
    def count(self) -> int:
        return sum(map(len, self._calls.values()))

    def begin(self, pipeline: str, call: MovableCall) -> None:
        self._calls.setdefault(pipeline, {})[call.call_id] = call

    def end(self, pipeline: str, call_id: str) -> None:
        calls = self._calls.get(pipeline, {})
        calls.pop(call_id, None)
        if not calls:
            self._calls.pop(pipeline, None)

    def share(self, pipeline: str, instance_id: str, sharers: int, room: int) -> CallHandOff:
        """Move one in `sharers` of the pipeline's calls to the instance, at most `room`."""
        calls = {call.unfinished.request_id: call for call in self._calls.get(pipeline, {}).values()}
        unfinished: Sequence[UnfinishedRequest] = [call.unfinished for call in calls.values()]
        taken = [calls[one.request_id] for one in share_of(unfinished, sharers, max(0, room))]
        for call in taken:
            call.go_to(instance_id)
        return CallHandOff(pipeline=pipeline, call_ids=tuple(call.call_id for call in taken))


def unfinished(call_id: str, work: Generate, made: int, *, has_token: bool) -> UnfinishedRequest:
    """Return the state of a generation that has produced `made` tokens, of the others half are expected.

    `has_token`: some of them on its current replica.
    """
    made += len(work.generated_ids)
    left = max(0, work.sampling.max_tokens - made)
    return UnfinishedRequest(
        request_id=call_id, tokens=len(work.prompt_ids) + made, left=(left + 1) // 2, has_token=has_token
    )
