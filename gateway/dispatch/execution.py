"""One call from its arrival to its last event: waiting, serving, and going on elsewhere.

Until the first output any work may be repeated on another instance. After it, a generation still
goes on where it was: a draw depends on (seed, position) alone, so that the tokens so far, sent along
as `generated_ids`, give the same continuation anywhere.
"""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from enum import Enum
from typing import Protocol

import msgspec

from gateway.admission import Ticket
from gateway.attempts import Attempt, ask_used
from gateway.contract import Assigned, Call, CallUse, DispatchError, Event, Stage
from gateway.directory import VersionKey
from gateway.live_calls import LiveCalls, unfinished
from gateway.live_spread import Unfinished
from gateway.node_client import NodeClient
from gateway.outlast import outlast
from gateway.servers import PipelineServer, Server
from registry.clock import Clock
from registry.errors import ChannelClosed, RemoteError
from registry.live_messages import MOVED, KvAt
from registry.messages import Arrays, Compute, Generate, HandlerChunk, InvokeHandler, Reply, Tokens, Usage


class Outcome(Enum):
    """Why an instance did not serve a call to its end, so that it goes elsewhere."""

    LOST = "lost"  # the channel to its node broke
    DRAINING = "draining"  # takes nothing new any more
    GONE = "gone"  # no such instance
    FULL = "full"  # no room now
    STAGE_LOST = "stage lost"  # of a pipeline, though not the node that the call was sent to
    MOVED = "moved"  # by a pipeline, as it was asked to, or since it ends


_REFUSALS = {
    "draining": Outcome.DRAINING,
    "no_such_instance": Outcome.GONE,
    "overloaded": Outcome.FULL,
    "no_such_pipeline": Outcome.GONE,
    "pipeline_lost": Outcome.STAGE_LOST,
}
_BEGUN = frozenset({Outcome.DRAINING, Outcome.STAGE_LOST})  # the instance may have worked on it
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

    @property
    def live_calls(self) -> LiveCalls: ...

    def again(self, ticket: Ticket, outcome: Outcome, *, failover: bool) -> None: ...

    def begun(self, ticket: Ticket) -> None: ...


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
        self._attempts: list[Attempt] = []  # of a pipeline one a member, the head's first
        self._tries = 0
        self._current = 0  # index of the first attempt of this try
        self._moving = False  # a pipeline has let go of it: it goes on elsewhere once its use is told
        self._began_s: float | None = None  # when an instance first took it
        self._tries_left = desk.max_tries
        self._shown: Stage | None = None
        self._announced = False  # whether the reader was told of the ticket's instance
        self._opened: AbstractAsyncContextManager[AsyncIterator[Reply]] | None = None  # at a node
        self._replies: AsyncIterator[Reply] | None = None
        self._pipeline = ""  # the name of the one that runs it now
        self._kv: KvAt | None = None  # of what is known, at a pipeline that has let go of it
        self._outputs_before = 0  # this attempt
        self._over = False

    def __repr__(self) -> str:
        return f"<Serving {self._call.request_id} {self._ticket!r} outputs={self._outputs}>"

    def __aiter__(self) -> "Serving":
        return self

    async def __anext__(self) -> Event:
        while not self._over:
            if self._replies is None and not (self._announced and self._ticket.instance is not None):
                news = await self._placed()
                if news is not None:
                    return news
            try:
                if self._replies is None:
                    await self._open()
                assert self._replies is not None
                reply = await self._replies.__anext__()
            except (ChannelClosed, RemoteError) as error:
                await self._close()
                if self._finished and isinstance(error, ChannelClosed):
                    self._over = True
                    return self._synthetic_usage()
                self._again(error)
                continue
            except StopAsyncIteration:
                if self._moving:
                    await self._close()
                    self._move()
                    continue
                node = self._attempts[self._current].node
                raise DispatchError(
                    "internal", f"{node} ended the call without its usage", status=500
                ) from None
            attempt = self._attempts[self._current]
            if isinstance(reply, Tokens) and reply.finish_reason == MOVED:
                self._moving = True
                if not reply.ids:
                    self._kv = reply.kv
                    attempt.gpu_us = max(attempt.gpu_us, reply.gpu_us)
                    continue
                reply = msgspec.structs.replace(reply, finish_reason="")
            elif self._moving and isinstance(reply, Usage):
                attempt.gpu_us = reply.gpu_us  # a step that is on its way may add to it: asked at the end
                await self._close()
                self._move()
                continue
            event = self._account(attempt, reply)
            self._over = isinstance(event, Usage)
            return event
        raise StopAsyncIteration

    @property
    def used(self) -> tuple[CallUse, ...]:
        return tuple([attempt.use for attempt in self._attempts])

    async def aclose(self) -> None:
        """Leave the call: the node that works on it, if any, is told to stop."""
        self._over = True
        if self._opened is not None:
            await self._close()

    @property
    def unheard(self) -> list[Attempt]:
        """The attempts whose nodes can still say what they spent on the call, and have not."""
        return [
            attempt
            for attempt in self._attempts
            if not attempt.exact and self._client_of(attempt) is not None
        ]

    async def learn_used(self) -> None:
        """After `aclose`: ask the nodes that did not come to say it what they spent on the call."""
        found = [(attempt, self._client_of(attempt)) for attempt in self._attempts if not attempt.exact]
        asked = {attempt.node: client for attempt, client in found if client is not None}
        if asked:
            await outlast(ask_used([attempt for attempt, client in found if client is not None], asked))

    def _client_of(self, attempt: Attempt) -> NodeClient | None:
        """The channel by which the attempt's node can still be asked, if there is one."""
        client = self._desk.client(attempt.node)
        return client if attempt.client in (None, client) else None

    # --- for LiveCalls

    @property
    def call_id(self) -> str:
        return self._attempts[self._current].call_id

    @property
    def unfinished(self) -> Unfinished:
        work = self._call.work
        assert isinstance(work, Generate)
        return unfinished(self.call_id, work, len(self._ids), begun=self._ticket.begun)

    def go_to(self, instance_id: str) -> None:
        self._ticket.goes_to = instance_id

    async def _placed(self) -> Stage | Assigned | None:
        """Wait for an instance or a change of the stage; what to tell of it, if anything."""
        ticket = self._ticket
        while ticket.instance is None:
            if ticket.error is not None:
                raise ticket.error
            stage = self._desk.stage(ticket.key)
            if stage != self._shown and not self._outputs:
                self._shown = stage
                return stage
            ticket.wake.clear()
            await ticket.wake.wait()
        self._announced = True
        return None if self._outputs else self._assigned(ticket.instance)

    async def _open(self) -> None:
        """Send the work to the ticket's instance. Raises ChannelClosed, RemoteError."""
        instance = self._ticket.instance
        assert instance is not None
        client = self._desk.client(instance.node)
        if client is None:
            raise ChannelClosed(f"no channel to {instance.node}")
        attempt = self._attempt(instance, client)
        self._outputs_before = self._outputs
        opened = client.call(self._work(attempt, instance))
        self._replies = await opened.__aenter__()
        self._opened = opened
        if isinstance(instance, PipelineServer):
            self._pipeline = instance.instance_id
            self._desk.live_calls.begin(instance.instance_id, self)

    async def _close(self) -> None:
        opened, self._opened, self._replies = self._opened, None, None
        if self._pipeline:
            self._desk.live_calls.end(self._pipeline, self.call_id)
            self._pipeline = ""
        if opened is not None:
            await opened.__aexit__(None, None, None)

    def _move(self) -> None:
        """Go on where another server takes it: nothing went wrong."""
        self._moving = False
        self._failed_over = self._failed_over or self._outputs > 0
        self._announced, self._shown = False, None
        self._desk.again(self._ticket, Outcome.MOVED, failover=False)

    def _again(self, error: ChannelClosed | RemoteError) -> None:
        """Give the call back to its lane, to go on elsewhere. Raises DispatchError where it cannot."""
        ticket = self._ticket
        instance = ticket.instance
        assert instance is not None
        if isinstance(error, ChannelClosed):
            outcome = Outcome.LOST
            self._check_repeatable(instance, error)
        else:
            refusal = _REFUSALS.get(error.code)
            if refusal is None or (self._outputs and not isinstance(self._call.work, Generate)):
                raise self._translated(error) from error
            outcome = refusal
            if outcome not in _BEGUN and self._outputs == self._outputs_before:
                del self._attempts[self._current :]  # refused before it began
                self._tries -= 1
        # A full instance is no failure: the call waits on, under its own limits.
        self._tries_left -= outcome is not Outcome.FULL
        if not self._tries_left:
            raise self._given_up(error) from error
        self._failed_over = self._failed_over or self._outputs > 0
        self._announced, self._shown = False, None
        self._moving = False
        self._desk.again(ticket, outcome, failover=outcome in (Outcome.LOST, Outcome.STAGE_LOST))
        if outcome is not Outcome.FULL:
            ticket.lost_instance()

    def _assigned(self, instance: Server) -> Assigned:
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
            start_kind=(
                "hot"
                if ticket.hot and not isinstance(instance, PipelineServer)
                else instance.start_kind.value
            ),
            queue_ms=(now - ready_s) * 1000,
            load_ms=(ready_s - ticket.arrived_s) * 1000,
            phases_ms={} if ticket.hot else instance.phases_ms,
        )

    def _attempt(self, instance: Server, client: NodeClient) -> Attempt:
        if self._began_s is None:
            self._began_s = self._clock.monotonic_s()
        number, self._current = self._tries, len(self._attempts)
        call_id = f"{self._call.request_id}+{number}" if number else self._call.request_id
        if isinstance(instance, PipelineServer):
            attempt = Attempt(call_id, instance.head.instance_id, instance.node, client)
            others = [Attempt(call_id, one.instance_id, one.node, None) for one in instance.others]
        else:
            attempt, others = Attempt(call_id, instance.instance_id, instance.node, client), []
        self._attempts += [attempt, *others]
        self._tries += 1
        return attempt

    def _work(self, attempt: Attempt, server: Server) -> Generate | Compute | InvokeHandler:
        work = msgspec.structs.replace(
            self._call.work, request_id=attempt.call_id, instance_id=attempt.instance_id
        )
        if isinstance(work, Generate) and isinstance(server, PipelineServer):
            work = msgspec.structs.replace(work, pipeline=server.instance_id)
        elif isinstance(work, Generate) and self._kv is not None:
            work = msgspec.structs.replace(work, kv=self._kv)
        if isinstance(work, Generate) and self._ids:
            return msgspec.structs.replace(work, generated_ids=work.generated_ids + tuple(self._ids))
        return work

    def _account(self, attempt: Attempt, reply: Reply) -> Event:
        match reply:
            case Tokens(ids=ids, finish_reason=reason, gpu_us=gpu_us):
                self._ids.extend(ids)
                self._kv = reply.kv
                if ids:
                    self._desk.begun(self._ticket)
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

    def _check_repeatable(self, instance: Server, error: ChannelClosed) -> None:
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
