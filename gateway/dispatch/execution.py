"""The execution of one call from its arrival to its last event: queueing, serving and failover.

Until the first output, any work may be retried on another replica. After it a generation can still continue
elsewhere: sampling depends on (seed, position) alone, so the tokens so far, sent as `generated_ids`, lead to
the same continuation on any replica.
"""

import asyncio
from collections.abc import Awaitable
from enum import Enum
from typing import Any, Protocol

import msgspec

from gateway.cluster.node_client import NodeCall, NodeClient
from gateway.cluster.replicas import PipelineReplica, Replica
from gateway.cluster.state_cache import VersionKey
from gateway.core.contract import Assigned, CallUsage, DispatchError, Event, FunctionCall, WaitStage, Work
from gateway.core.open_call import DeadlineTimer, OpenCall
from gateway.dispatch.admission import QueuedRequest
from gateway.dispatch.movable_calls import MovableCalls, unfinished
from gateway.dispatch.node_requests import hand_off, leave_instance, prefetch_kv
from gateway.dispatch.outcomes import (
    MAYBE_STARTED,
    REFUSALS,
    ReplicaOutcome,
    given_up,
    translated,
    whole_usage,
)
from gateway.dispatch.replica_calls import ReplicaCall, collect_usage
from gateway.dispatch.targets import UnfinishedRequest
from gateway.dispatch.tokenizers import TokenizerSender
from rdmacast.aio.shielded import run_shielded
from registry.clock import Clock
from registry.errors import ChannelClosed, RemoteError
from registry.messages.forward import ForwardedChunk, ForwardedHead
from registry.messages.live import MOVED, HandOffCalls, KvLocation, LeaveInstance, PrefetchKv
from registry.messages.node import (
    Arrays,
    Generate,
    HandlerChunk,
    Reply,
    RequestUsage,
    Tokens,
)
from registry.records.engine import EngineKind
from registry.records.instance import InstanceRecord


def _nodes_of(server: Replica) -> tuple[str, ...]:
    if isinstance(server, PipelineReplica):
        return tuple(stage.node for stage in server.pipeline.stages)
    return (server.node,)


class _State(Enum):
    """The life of a call; a failure or a hand-off queues it again."""

    QUEUED = "queued"
    ASSIGNED = "assigned"  # to a replica, which has not got it yet
    RUNNING = "running"
    MOVING = "moving"  # handed off: continues elsewhere once its usage is reported
    FINISHED = "finished"  # the last output has arrived, only the usage is missing
    OVER = "over"


class RequestRouter(Protocol):
    """What an execution needs of the dispatcher. No method blocks."""

    def enter(self, call: FunctionCall) -> QueuedRequest: ...

    def leave(self, queued: QueuedRequest) -> None: ...

    def client(self, node: str) -> NodeClient | None: ...

    def gpu_of(self, node: str) -> tuple[str, int]: ...

    def stage(self, key: VersionKey) -> WaitStage: ...

    @property
    def deadlines(self) -> DeadlineTimer: ...

    @property
    def max_tries(self) -> int: ...

    @property
    def movable_calls(self) -> MovableCalls: ...

    @property
    def tokenizers(self) -> TokenizerSender: ...

    def hands_off(self, key: VersionKey, server: Replica) -> bool: ...

    def reserve(self, queued: QueuedRequest) -> InstanceRecord | None: ...

    def reserve_elsewhere(self, queued: QueuedRequest) -> InstanceRecord | None: ...

    def unreserve(self, queued: QueuedRequest) -> None: ...

    def reroute(
        self, queued: QueuedRequest, outcome: ReplicaOutcome, *, failover: bool, has_kv: bool = False
    ) -> None: ...

    def on_first_token(self, queued: QueuedRequest) -> None: ...

    def on_tokens(self, queued: QueuedRequest, count: int, *, first: bool) -> None: ...


class RequestExecution(OpenCall):
    """A call that survives the loss of its replica.

    Each try has an id of its own, so that its usage is accounted separately.
    """

    _queued: QueuedRequest
    _state = _State.QUEUED
    _failed_over = False
    _tries = 0
    _current = 0  # index of the first one of this try
    _first_run_s: float | None = None  # when a replica first ran it
    _shown: WaitStage | None = None
    _opened: NodeCall | None = None
    _replica = ""  # its key in `movable_calls` now
    _kv: KvLocation | None = None  # of its KV cache, where it was handed off
    _kv_at = ""  # the only instance that can have that, once it fetches it; "" for any
    _prefetching: asyncio.Task[None] | None = None  # asks a decode instance to fetch that
    _moving: asyncio.Task[bool] | None = None  # asks for the move to a decode instance
    _landed: asyncio.Event | None = None  # of the instance that it leaves: set once it runs elsewhere
    _outputs_before = 0  # outputs of earlier tries
    _forwarded: ForwardedChunk | None = None  # the latest, which has the tokens so far

    def __init__(self, router: RequestRouter, call: FunctionCall, clock: Clock) -> None:
        super().__init__(call, router.deadlines)
        self._router = router
        self._clock = clock
        self._token_ids: list[int] = []  # generated so far
        self._replica_calls: list[ReplicaCall] = []  # of a pipeline one per stage, that of the head first
        self._tries_left = router.max_tries

    def _enter(self) -> None:
        self._queued = self._router.enter(self.call)

    def _leave(self) -> Awaitable[None] | None:
        """Abort the call, also on the node that runs it, and request usage that was not reported."""
        self._state = _State.OVER
        self._close()
        self._land()
        self._queued.output_tokens, self._queued.is_error = len(self._token_ids), self.is_error
        self._router.leave(self._queued)
        for replica_call in self._replica_calls:
            if not replica_call.exact:
                return self._collect_unreported()
        return None

    def _next_now(self) -> Event | None:
        if self._opened is not None:
            reply = self._opened.take()
            return None if reply is None else self._account(self._replica_calls[self._current], reply)
        instance = self._queued.instance
        if self._state is not _State.QUEUED or instance is None or self.outputs:
            return None
        self._state = _State.ASSIGNED
        return self._assigned(instance)

    async def _next(self) -> Event:
        while self._state is not _State.OVER:
            if self._state is _State.QUEUED and (news := await self._placed()) is not None:
                return news
            try:
                if self._opened is None:
                    await self._open()
                assert self._opened is not None
                reply = await self._opened.__anext__()
            except (ChannelClosed, RemoteError) as error:
                self._close()
                if self._state is _State.MOVING:  # the hand-off was complete
                    self._reroute(ReplicaOutcome.MOVED, failover=False)
                    continue
                if self._state is _State.FINISHED and isinstance(error, ChannelClosed):
                    self._state = _State.OVER
                    return self._whole(self._forwarded)
                self._retry(error)
            except StopAsyncIteration:
                if self._state is not _State.MOVING:
                    node = self._replica_calls[self._current].node
                    raise DispatchError(
                        "internal", f"{node} ended the call without reporting its usage", status=500
                    ) from None
                self._close()
                self._reroute(ReplicaOutcome.MOVED, failover=False)
            else:
                if (event := self._account(self._replica_calls[self._current], reply)) is not None:
                    return event
        raise StopAsyncIteration

    @property
    def used(self) -> tuple[CallUsage, ...]:
        return tuple(map(ReplicaCall.use, self._replica_calls))

    async def _collect_unreported(self) -> None:
        """Request the missing usage from the nodes that can still report it."""
        missing: list[ReplicaCall] = []
        clients: dict[str, NodeClient] = {}
        for replica_call in self._replica_calls:
            if not replica_call.exact and (client := self._client_of(replica_call)) is not None:
                missing.append(replica_call)
                clients[replica_call.node] = client
        if missing:
            await run_shielded(collect_usage(missing, clients))

    def _client_of(self, replica_call: ReplicaCall) -> NodeClient | None:
        """Return the channel to the node that can still report the usage, if any."""
        client = self._router.client(replica_call.node)
        return client if replica_call.client in (None, client) else None

    # --- for MovableCalls

    @property
    def call_id(self) -> str:
        return self._replica_calls[self._current].call_id

    @property
    def unfinished(self) -> UnfinishedRequest:
        work = self.call.work
        assert isinstance(work, Generate)
        return unfinished(self.call_id, work, len(self._token_ids), has_token=self._queued.has_token)

    def go_to(self, instance_id: str) -> None:
        self._queued.goes_to = instance_id

    async def leave_instance(self) -> bool:
        """Move to another instance; return once it runs there, or False at once if none has room for it."""
        queued = self._queued
        instance, running = queued.instance, self._state is _State.RUNNING and queued.has_token
        if not running or instance is None or self._landed is not None:
            return False
        client = self._router.client(instance.node)
        if client is None or self._router.reserve_elsewhere(queued) is None:
            return False
        request = LeaveInstance(instance_id=instance.instance_id, request_ids=(self.call_id,))
        landed, self._kv_at = asyncio.Event(), ""
        self._landed = landed
        try:
            if await leave_instance(client, request):
                await landed.wait()
                return True
        finally:
            self._landed = None
        self._router.unreserve(queued)
        return False

    async def _placed(self) -> WaitStage | Assigned | None:
        """Wait for a replica or a change of the stage; return the event to report, if any."""
        queued = self._queued
        while queued.instance is None:
            if queued.error is not None:
                raise queued.error
            stage = self._router.stage(queued.key)
            if stage != self._shown and not self.outputs:
                self._shown = stage
                return stage
            await queued.changed()
        self._state = _State.ASSIGNED
        return None if self.outputs else self._assigned(queued.instance)

    async def _open(self) -> None:
        """Send the work to the assigned replica. Raises ChannelClosed, RemoteError."""
        instance = self._queued.instance
        assert instance is not None
        client = self._router.client(instance.node)
        if client is None:
            raise ChannelClosed(f"no channel to {instance.node}")
        replica_call = self._new_replica_call(instance, client)
        self._outputs_before = self.outputs
        if self._has_grammar:
            await self._router.tokenizers.send(self.call.version, _nodes_of(instance))
        opened = client.call(self._work(replica_call, instance))
        await opened.__aenter__()
        self._opened, self._state = opened, _State.RUNNING
        if self._can_leave(instance):
            self._replica = instance.instance_id
            self._router.movable_calls.begin(instance.instance_id, self)

    def _can_leave(self, server: Replica) -> bool:
        """Return whether a replica hands off running calls: a pipeline, or one node's native engine."""
        if isinstance(server, PipelineReplica):
            return True
        is_native = isinstance(self.call.work, Generate) and self.call.version.engine is EngineKind.NATIVE
        return is_native and isinstance(server, InstanceRecord) and not server.helpers

    @property
    def _has_grammar(self) -> bool:
        return isinstance(self.call.work, Generate) and bool(self.call.work.sampling.grammar)

    def _close(self) -> None:
        opened, self._opened = self._opened, None
        if self._replica:
            self._router.movable_calls.end(self._replica, self.call_id)
            self._replica = ""
        if opened is not None:
            opened.cancel()

    def _reroute(self, outcome: ReplicaOutcome, *, failover: bool) -> None:
        if self._prefetching is not None and not self._kv_at:
            self._prefetching.cancel()  # not sent yet: sent after the call, it would take its K and V away
        self._failed_over = self._failed_over or self.outputs > 0
        self._state, self._shown = _State.QUEUED, None
        self._router.reroute(self._queued, outcome, failover=failover, has_kv=self._kv is not None)

    def _retry(self, error: ChannelClosed | RemoteError) -> None:
        """Queue the call again after a failure. Raises DispatchError if it cannot be retried."""
        queued = self._queued
        instance = queued.instance
        assert instance is not None
        rejected = False
        if isinstance(error, ChannelClosed):
            outcome = ReplicaOutcome.LOST
            self._check_repeatable(instance, error)
        else:
            refusal = REFUSALS.get(error.code)
            if refusal is None or (self.outputs and not isinstance(self.call.work, Generate)):
                raise translated(error, self.call.request_id) from error
            outcome = refusal
            if error.code == "no_tokenizer":
                self._router.tokenizers.forget(_nodes_of(instance))
            rejected = outcome not in MAYBE_STARTED and self.outputs == self._outputs_before
        if rejected:  # before it began
            del self._replica_calls[self._current :]
            self._tries -= 1
        else:
            self._kv, self._kv_at = None, ""  # perhaps fetched, which is possible once
        # A full replica is no failure: the call keeps waiting under its own deadlines.
        self._tries_left -= outcome is not ReplicaOutcome.FULL
        if not self._tries_left:
            raise given_up(error, self.call.request_id) from error
        self._reroute(outcome, failover=outcome in (ReplicaOutcome.LOST, ReplicaOutcome.STAGE_LOST))
        if outcome is not ReplicaOutcome.FULL:
            queued.lost_instance()

    def _assigned(self, instance: Replica) -> Assigned:
        """Return the assignment; waiting counts as load until an instance is ready, then as queueing."""
        queued, now = self._queued, self._clock.monotonic_s()
        ready_s = (
            queued.arrived_s if queued.hot else min(now, now if queued.ready_s is None else queued.ready_s)
        )
        gpu_type, gpu_count = self._router.gpu_of(instance.node)
        return Assigned(
            instance_id=instance.instance_id,
            node=instance.node,
            gpu_type=gpu_type,
            gpu_count=gpu_count,
            start_kind=(
                "hot"
                if queued.hot and not isinstance(instance, PipelineReplica)
                else instance.start_kind.value
            ),
            queue_ms=(now - ready_s) * 1000,
            load_ms=(ready_s - queued.arrived_s) * 1000,
            phases_ms={} if queued.hot else instance.phases_ms,
        )

    def _new_replica_call(self, instance: Replica, client: NodeClient) -> ReplicaCall:
        if self._first_run_s is None:
            self._first_run_s = self._clock.monotonic_s()
        number, self._current = self._tries, len(self._replica_calls)
        call_id = f"{self.call.request_id}+{number}" if number else self.call.request_id
        if isinstance(instance, PipelineReplica):
            replica_call = ReplicaCall(call_id, instance.head.instance_id, instance.node, client)
            others = [ReplicaCall(call_id, one.instance_id, one.node, None) for one in instance.others]
        else:
            replica_call = ReplicaCall(call_id, instance.instance_id, instance.node, client)
            helpers = instance.helpers if isinstance(instance, InstanceRecord) else ()
            others = [ReplicaCall(call_id, one.instance_id, one.node, None) for one in helpers]
        self._replica_calls += [replica_call, *others]
        self._tries += 1
        return replica_call

    def _work(self, replica_call: ReplicaCall, server: Replica) -> Work:
        work = self.call.work
        fields: dict[str, Any] = {
            "request_id": replica_call.call_id,
            "instance_id": replica_call.instance_id,
        }
        if isinstance(work, Generate):
            fields["generated_ids"] = work.generated_ids + tuple(self._token_ids)
            if isinstance(server, PipelineReplica):
                fields["pipeline"] = server.instance_id
            else:
                fields["kv"] = self._kv if self._kv_at in ("", server.instance_id) else None
                fields["hand_off"] = self._router.hands_off(self._queued.key, server)
        return msgspec.structs.replace(work, **fields)

    def _account(self, replica_call: ReplicaCall, reply: Reply) -> Event | None:
        """Count a reply; return its event, if any."""
        moving = self._state is _State.MOVING
        match reply:
            case Tokens(ids=(), finish_reason="", kv=KvLocation() as kv):  # its prompt begins to run
                self._prefetch(kv)
                return None
            case Tokens(ids=ids, finish_reason=reason, gpu_us=gpu_us):
                if ids:
                    self._router.on_tokens(self._queued, len(ids), first=not self._token_ids)
                self._token_ids.extend(ids)
                self._kv = reply.kv
                replica_call.gpu_us = max(replica_call.gpu_us, gpu_us)
                if ids and not self._queued.has_token:
                    self._router.on_first_token(self._queued)
                    self._land()
                    if not reason:
                        self._leave_pipeline()
                if moving or reason == MOVED:
                    self._state = _State.MOVING
                    return msgspec.structs.replace(reply, finish_reason="") if ids else None
                if reason:
                    self._state = _State.FINISHED
            case HandlerChunk(stream=True):
                pass
            case HandlerChunk(usage=RequestUsage(gpu_us=gpu_us)):
                replica_call.gpu_us, replica_call.exact = gpu_us, True
                self._state = _State.OVER
            case ForwardedHead():
                pass
            case ForwardedChunk(gpu_us=gpu_us):
                self._note_forwarded(reply)
                replica_call.gpu_us = max(replica_call.gpu_us, gpu_us)
                self._forwarded = reply
                if reply.last:
                    self._state = _State.FINISHED
            case Arrays() | HandlerChunk():
                self._state = _State.FINISHED
            case RequestUsage(gpu_us=gpu_us):
                # After a hand-off a running step may add to it: requested again at the end.
                replica_call.gpu_us, replica_call.exact = gpu_us, not moving
                if moving:
                    return None
                self._state = _State.OVER
                return self._whole(reply) if self._failed_over else reply
            case _:
                raise DispatchError("internal", f"unexpected reply {type(reply).__name__}", status=500)
        return reply

    def _note_forwarded(self, chunk: ForwardedChunk) -> None:
        before = 0 if self._forwarded is None else self._forwarded.completion_tokens
        if chunk.completion_tokens > before:
            self._router.on_tokens(self._queued, chunk.completion_tokens - before, first=not before)

    def _prefetch(self, kv: KvLocation) -> None:
        """Let a decode instance fetch K and V while they are computed."""
        instance, work = self._router.reserve(self._queued), self.call.work
        client = None if instance is None else self._router.client(instance.node)
        if instance is not None and client is not None and isinstance(work, Generate):
            tokens = len(work.prompt_ids) + len(work.generated_ids) + len(self._token_ids)
            request = PrefetchKv(instance_id=instance.instance_id, kv=kv, tokens=tokens)
            self._prefetching = asyncio.create_task(self._prefetched(client, request))

    async def _prefetched(self, client: NodeClient, request: PrefetchKv) -> None:
        self._kv_at = request.instance_id  # from when the request is sent: K and V can be fetched once
        if not await prefetch_kv(client, request):
            self._kv_at = ""

    def _land(self) -> None:
        if self._landed is not None:
            self._landed.set()

    def _leave_pipeline(self) -> None:
        """Move a call whose prompt a pipeline has run to a decode instance, if one has room for it."""
        head = self._queued.instance
        if not isinstance(head, PipelineReplica) or self._router.reserve(self._queued) is None:
            return
        client, pipeline = self._router.client(head.node), head.pipeline
        if client is not None:
            request = HandOffCalls(
                pipeline=pipeline.pipeline_id, epoch=pipeline.epoch, request_ids=(self.call_id,)
            )
            self._moving = asyncio.create_task(hand_off(client, request))

    def _whole(self, usage: RequestUsage | ForwardedChunk | None) -> RequestUsage:
        """Return the usage of the whole call, of which its last node ran only a part, or was lost."""
        return whole_usage(
            self.call.work, usage, tokens=len(self._token_ids), gpu_us=self._gpu_us, exec_us=self._exec_us
        )

    @property
    def _gpu_us(self) -> int:
        return sum(replica_call.gpu_us for replica_call in self._replica_calls)

    @property
    def _exec_us(self) -> int:
        """Microseconds since a replica first ran it."""
        now = self._clock.monotonic_s()
        return round((now - (now if self._first_run_s is None else self._first_run_s)) * 1e6)

    def _check_repeatable(self, instance: Replica, error: ChannelClosed) -> None:
        if self.outputs and self._state is not _State.FINISHED and not isinstance(self.call.work, Generate):
            raise DispatchError(
                "internal", f"node {instance.node} was lost in the middle of its response", status=500
            ) from error
