"""One call from its arrival to its last event: waiting, serving, and going on elsewhere.

Until the first output any work may be repeated on another instance. After it, a generation still
goes on where it was: a draw depends on (seed, position) alone, so that the tokens so far, sent along
as `generated_ids`, give the same continuation anywhere. What a lost node had computed is not billed.
"""

from collections.abc import AsyncGenerator
from enum import Enum
from typing import Protocol

import msgspec

from gateway.admission import Ticket
from gateway.contract import Assigned, Call, DispatchError, Event, Stage
from gateway.directory import VersionKey
from gateway.node_client import NodeClient
from registry.clock import Clock
from registry.errors import ChannelClosed, RemoteError
from registry.instance import InstanceRecord
from registry.messages import Arrays, Compute, Generate, HandlerChunk, InvokeHandler, Reply, Tokens, Usage


class Outcome(Enum):
    """Why an instance did not serve a call to its end, so that it goes elsewhere."""

    LOST = "lost"  # the channel to its node broke
    DRAINING = "draining"  # takes nothing new any more
    GONE = "gone"  # no such instance
    FULL = "full"  # no room now


_REFUSALS = {
    "draining": Outcome.DRAINING,
    "no_such_instance": Outcome.GONE,
    "overloaded": Outcome.FULL,
}
_ERRORS = {
    "start_failed": ("start_failed", 503),
    "out_of_memory": ("bad_request", 400),
    "bad_request": ("bad_request", 400),
    "handler_error": ("function_error", 500),
    "handler_not_allowed": ("start_failed", 503),
    "draining": ("draining", 503),
    "overloaded": ("overloaded", 503),
}


class Desk(Protocol):
    """The part of the dispatcher that a call needs."""

    def client(self, node: str) -> NodeClient | None: ...

    def gpu_of(self, node: str) -> tuple[str, int]: ...

    def stage(self, key: VersionKey) -> Stage: ...

    @property
    def max_tries(self) -> int: ...

    def again(self, ticket: Ticket, outcome: Outcome, *, failover: bool) -> None: ...


class Serving:
    def __init__(self, desk: Desk, call: Call, ticket: Ticket, clock: Clock) -> None:
        self._desk = desk
        self._call = call
        self._ticket = ticket
        self._clock = clock
        self._ids: list[int] = []  # what was generated so far
        self._outputs = 0
        self._finished = False  # the last output came; only Usage is missing
        self._failed_over = False
        self._gpu_us = 0  # of the last instance, as far as told

    def __repr__(self) -> str:
        return f"<Serving {self._call.request_id} {self._ticket!r} outputs={self._outputs}>"

    async def events(self) -> AsyncGenerator[Event, None]:
        """All events of the call; ends after Usage. To be closed by whoever does not read to the end."""
        ticket = self._ticket
        tries_left = self._desk.max_tries
        while True:
            shown: Stage | None = None
            while ticket.instance is None:
                if ticket.error is not None:
                    raise ticket.error
                stage = self._desk.stage(ticket.key)
                if stage != shown and not self._outputs:
                    shown = stage
                    yield stage
                    continue
                ticket.wake.clear()
                await ticket.wake.wait()
            instance = ticket.instance
            if not self._outputs:
                yield self._assigned(instance)
            try:
                client = self._desk.client(instance.node)
                if client is None:
                    raise ChannelClosed(f"no channel to {instance.node}")
                async with client.call(self._work(instance)) as replies:
                    while (reply := await anext(replies, None)) is not None:
                        event = self._account(reply)
                        yield event
                        if isinstance(event, Usage):
                            return
                raise DispatchError(
                    "internal", f"{instance.node} ended the call without its usage", status=500
                )
            except ChannelClosed as error:
                outcome = Outcome.LOST
                self._check_repeatable(instance, error)
                if self._finished:
                    yield self._synthetic_usage()
                    return
                lost: Exception = error
            except RemoteError as error:
                refusal = _REFUSALS.get(error.code)
                if refusal is None or (self._outputs and not isinstance(self._call.work, Generate)):
                    raise self._translated(error) from error
                outcome, lost = refusal, error
            # A full instance is no failure: the call waits on, under its own limits.
            tries_left -= outcome is not Outcome.FULL
            if not tries_left:
                raise self._given_up(lost) from lost
            self._failed_over = self._failed_over or self._outputs > 0
            self._desk.again(ticket, outcome, failover=outcome is Outcome.LOST)
            if outcome is not Outcome.FULL:
                ticket.lost_instance()

    def _assigned(self, instance: InstanceRecord) -> Assigned:
        """Waiting counts as load until a first instance was ready, and as queueing after."""
        ticket, now = self._ticket, self._clock.monotonic_s()
        ready_s = (
            ticket.arrived_s if ticket.hot else min(now, now if ticket.ready_s is None else ticket.ready_s)
        )
        gpu_type, gpu_count = self._desk.gpu_of(instance.node)
        return Assigned(
            instance_id=instance.instance_id,
            node=instance.node,
            gpu_type=gpu_type,
            gpu_count=gpu_count,
            start_kind="hot" if ticket.hot else instance.start_kind.value,
            queue_ms=(now - ready_s) * 1000,
            load_ms=(ready_s - ticket.arrived_s) * 1000,
            phases_ms={} if ticket.hot else instance.phases_ms,
        )

    def _work(self, instance: InstanceRecord) -> Generate | Compute | InvokeHandler:
        work = self._call.work
        if isinstance(work, Generate):
            generated = work.generated_ids + tuple(self._ids)
            return msgspec.structs.replace(work, instance_id=instance.instance_id, generated_ids=generated)
        return msgspec.structs.replace(work, instance_id=instance.instance_id)

    def _account(self, reply: Reply) -> Event:
        match reply:
            case Tokens(ids=ids, finish_reason=reason, gpu_us=gpu_us):
                self._ids.extend(ids)
                self._gpu_us = gpu_us
                self._finished = bool(reason)
            case Arrays():
                self._finished = True
            case HandlerChunk(stream=stream):
                self._finished = not stream
            case Usage():
                return self._whole(reply)
            case _:
                raise DispatchError("internal", f"unexpected reply {type(reply).__name__}", status=500)
        self._outputs += 1
        return reply

    def _whole(self, usage: Usage) -> Usage:
        """The usage of the whole call, where its node saw only the last part of it."""
        work = self._call.work
        if not self._failed_over or not isinstance(work, Generate):
            return usage
        return msgspec.structs.replace(
            usage, prompt_tokens=len(work.prompt_ids), completion_tokens=len(self._ids)
        )

    def _synthetic_usage(self) -> Usage:
        """The call is complete, but its node was lost before it said what it used in all."""
        work = self._call.work
        prompt = len(work.prompt_ids) if isinstance(work, Generate) else 0
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=len(self._ids),
            gpu_us=self._gpu_us,
            queue_us=0,
            exec_us=self._gpu_us,
        )

    def _check_repeatable(self, instance: InstanceRecord, error: ChannelClosed) -> None:
        if self._outputs and not self._finished and not isinstance(self._call.work, Generate):
            raise DispatchError(
                "internal", f"node {instance.node} was lost in the middle of its answer", status=500
            ) from error

    @staticmethod
    def _translated(error: RemoteError) -> DispatchError:
        code, status = _ERRORS.get(error.code, ("internal", 500))
        return DispatchError(code, error.message, status=status, retry_after_s=5 if status == 503 else None)

    @staticmethod
    def _given_up(error: Exception) -> DispatchError:
        if isinstance(error, RemoteError):
            return Serving._translated(error)
        return DispatchError("internal", f"the call was sent anew too often; at last: {error}", status=500)
