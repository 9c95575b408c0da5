"""This gateway's calls on pipelines, and which of them go elsewhere once a member serves alone. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.live_spread import Unfinished, share_of
from registry.messages import Generate


class LiveCall(Protocol):
    """A call that a pipeline runs. Setting `goes_to` names the instance that it is to go on at."""

    @property
    def call_id(self) -> str:
        """By which the node knows it."""
        ...

    @property
    def unfinished(self) -> Unfinished: ...

    def go_to(self, instance_id: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """Calls that a pipeline's head is to end as moved."""

    pipeline: str
    call_ids: tuple[str, ...]


class LiveCalls:
    """`begin` and `end` are the calls' own; each is on one pipeline at most."""

    def __init__(self) -> None:
        self._calls: dict[str, dict[str, LiveCall]] = {}

    def __repr__(self) -> str:
        return f"<LiveCalls { {name: len(calls) for name, calls in self._calls.items()} }>"

    @property
    def count(self) -> int:
        return sum(map(len, self._calls.values()))

    def begin(self, pipeline: str, call: LiveCall) -> None:
        self._calls.setdefault(pipeline, {})[call.call_id] = call

    def end(self, pipeline: str, call_id: str) -> None:
        calls = self._calls.get(pipeline, {})
        calls.pop(call_id, None)
        if not calls:
            self._calls.pop(pipeline, None)

    def share(self, pipeline: str, instance_id: str, sharers: int, room: int) -> Leaving:
        """One in `sharers` of the pipeline's calls goes to the instance, as many as have room."""
        calls = {call.unfinished.request_id: call for call in self._calls.get(pipeline, {}).values()}
        unfinished: Sequence[Unfinished] = [call.unfinished for call in calls.values()]
        taken = [calls[one.request_id] for one in share_of(unfinished, sharers, max(0, room))]
        for call in taken:
            call.go_to(instance_id)
        return Leaving(pipeline=pipeline, call_ids=tuple(call.call_id for call in taken))


def unfinished(call_id: str, work: Generate, made: int, *, begun: bool) -> Unfinished:
    """A generation that has made so many tokens, and has `begun` if it made some where it is. About half of
    what it may still make is expected."""
    made += len(work.generated_ids)
    left = max(0, work.sampling.max_tokens - made)
    return Unfinished(
        request_id=call_id, tokens=len(work.prompt_ids) + made, left=(left + 1) // 2, begun=begun
    )
