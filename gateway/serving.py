"""One call from its arrival to its last event: waiting, serving, and going on elsewhere.

Until the first output any work may be repeated on another instance. After it, a generation still
goes on where it was: a draw depends on (seed, position) alone, so that the tokens so far, sent along
as `generated_ids`, give the same continuation anywhere.
"""

from collections.abc import AsyncGenerator, Coroutine
from enum import Enum
from typing import Any, Protocol

import msgspec

from gateway.admission import Ticket
from gateway.attempts import Attempt, ask_used
from gateway.contract import Assigned, Call, CallUse, DispatchError, Event, Stage
from gateway.directory import VersionKey
from gateway.node_client import NodeClient
from gateway.outlast import outlast
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
    """An OpenCall. Each attempt on an instance has an id of its own, so that its use can be told apart."""

    def __init__(self, desk: Desk, call: Call, ticket: Ticket, clock: Clock) -> None:
        self._desk = desk
        self._call = call
        self._ticket = ticket
        self._clock = clock
        self._ids: list[int] = []  # what was generated so far
        self._outputs = 0
        self._finished = False  # the last output came; only Usage is missing
        self._failed_over = False
        self._attempts: list[Attempt] = []
        self._began_s: float | None = None  # when an instance first took it
        self._events = self._run()

    def __repr__(self) -> str:
        return f"<Serving {self._call.request_id} {self._ticket!r} outputs={self._outputs}>"

    def __aiter__(self) -> "Serving":
        return self

    def __anext__(self) -> Coroutine[Any, Any, Event]:
        return self._events.__anext__()

    @property
    def used(self) -> tuple[CallUse, ...]:
        return tuple(attempt.use for attempt in self._attempts)

    async def aclose(self) -> None:
        """Leave the call: the node that works on it, if any, is told to stop."""
        await self._events.aclose()

    async def learn_used(self) -> None:
        """After `aclose`: ask the nodes that did not come to say it what they spent on the call."""
        unheard = [
            attempt
            for attempt in self._attempts
            if not attempt.exact and self._desk.client(attempt.node) is attempt.client
        ]
        if unheard:
            await outlast(ask_used(unheard))

    async def _run(self) -> AsyncGenerator[Event, None]:
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
                attempt = self._attempt(instance, client)
                outputs_before = self._outputs
                async with client.call(self._work(attempt)) as replies:
                    while (reply := await anext(replies, None)) is not None:
                        event = self._account(attempt, reply)
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
                if outcome is not Outcome.DRAINING and self._outputs == outputs_before:
                    self._attempts.remove(attempt)  # refused before it began
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

    def _attempt(self, instance: InstanceRecord, client: NodeClient) -> Attempt:
        if self._began_s is None:
            self._began_s = self._clock.monotonic_s()
        number = len(self._attempts)
        call_id = f"{self._call.request_id}+{number}" if number else self._call.request_id
        attempt = Attempt(call_id, instance.instance_id, instance.node, client)
        self._attempts.append(attempt)
        return attempt

    def _work(self, attempt: Attempt) -> Generate | Compute | InvokeHandler:
        work = msgspec.structs.replace(
            self._call.work, request_id=attempt.call_id, instance_id=attempt.instance_id
        )
        if isinstance(work, Generate) and self._ids:
            return msgspec.structs.replace(work, generated_ids=work.generated_ids + tuple(self._ids))
        return work

    def _account(self, attempt: Attempt, reply: Reply) -> Event:
        match reply:
            case Tokens(ids=ids, finish_reason=reason, gpu_us=gpu_us):
                self._ids.extend(ids)
                attempt.gpu_us = max(attempt.gpu_us, gpu_us)
                self._finished = bool(reason)
            case Arrays():
                self._finished = True
            case HandlerChunk(stream=stream):
                self._finished = not stream
            case Usage(gpu_us=gpu_us):
                attempt.gpu_us, attempt.exact = gpu_us, True
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
            usage,
            prompt_tokens=len(work.prompt_ids),
            completion_tokens=len(self._ids),
            gpu_us=self._gpu_us,
            exec_us=self._exec_us,
        )

    def _synthetic_usage(self) -> Usage:
        """The call is complete, but its node was lost before it said what it used in all."""
        match self._call.work:
            case Generate(prompt_ids=ids):
                prompt = len(ids)
            case Compute(token_ids=texts):
                prompt = sum(map(len, texts))
            case _:
                prompt = 0
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=len(self._ids),
            gpu_us=self._gpu_us,
            queue_us=0,
            exec_us=self._exec_us,
        )

    @property
    def _gpu_us(self) -> int:
        return sum(attempt.gpu_us for attempt in self._attempts)

    @property
    def _exec_us(self) -> int:
        """Since an instance first took it."""
        now = self._clock.monotonic_s()
        return round((now - (now if self._began_s is None else self._began_s)) * 1e6)

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
