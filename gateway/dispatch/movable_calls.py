"""The generations of this gateway by replica, and which of them move when a pipeline's member is promoted."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.cluster.condition import ChangeCondition
from gateway.dispatch.targets import UnfinishedRequest, share_of
from registry.messages.node import Generate


class MovableCall(Protocol):
    """A generation on a pipeline or an instance."""

    @property
    def call_id(self) -> str:
        """Its id on the node."""
        ...

    @property
    def unfinished(self) -> UnfinishedRequest: ...

    def go_to(self, instance_id: str) -> None:
        """Set the instance on which it is to continue when its pipeline hands it off."""
        ...

    async def leave_instance(self) -> bool:
        """Move to another instance; return once it runs there, or False at once if none has room for it.

        It moves only after its first token from this instance.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CallHandOff:
    """Calls that a pipeline's head is to hand off."""

    pipeline: str
    call_ids: tuple[str, ...]


class MovableCalls:
    """The running generations by replica; each adds and removes itself and is on one replica at most.

    `changed` is notified when one has ended, and when one has its first token of a replica.
    """

    def __init__(self) -> None:
        self._calls: dict[str, dict[str, MovableCall]] = {}
        self.changed = ChangeCondition()

    def __repr__(self) -> str:
        return f"<MovableCalls { {name: len(calls) for name, calls in self._calls.items()} }>"

    def begin(self, replica: str, call: MovableCall) -> None:
        self._calls.setdefault(replica, {})[call.call_id] = call

    def end(self, replica: str, call_id: str) -> None:
        calls = self._calls.get(replica, {})
        calls.pop(call_id, None)
        if not calls:
            self._calls.pop(replica, None)
        self.changed.notify()

    @property
    def replicas(self) -> Sequence[str]:
        """The ids of instances, and names of pipelines, that run some."""
        return tuple(self._calls)

    def on(self, replica: str) -> Sequence[MovableCall]:
        """Return the calls on a replica, the oldest first."""
        return tuple(self._calls.get(replica, {}).values())

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
