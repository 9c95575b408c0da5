"""The dispatcher of calls: admission, queueing and assignment to replicas."""

import asyncio
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from gateway.cluster.condition import ChangeCondition
from gateway.cluster.context import ClusterContext
from gateway.cluster.node_client import ChannelPool
from gateway.cluster.replicas import PipelineReplica, Replica, slots_key_of
from gateway.cluster.state_cache import VersionKey
from gateway.core.contract import FunctionCall, WaitStage
from gateway.core.open_call import DeadlineTimer
from gateway.dispatch.admission import Admission, QueuedRequest, RequestQueue
from gateway.dispatch.demand import DemandPublisher
from gateway.dispatch.execution import RequestExecution
from gateway.dispatch.fairness import WeightedFairQueue
from gateway.dispatch.movable_calls import MovableCalls
from gateway.dispatch.outcomes import ReplicaOutcome
from gateway.dispatch.progress import StartProgress
from gateway.dispatch.router import CallTokens, ReplicaSlots, concurrency_of
from gateway.dispatch.tokenizers import TokenizerSender
from gateway.dispatch.unservable import UnservableCalls
from registry.records.change import CallTraffic, InstanceChanged
from registry.records.function import ScalingMode
from registry.records.instance import InstanceRecord, InstanceState
from registry.records.live import InstanceRole

# Delay of the load report for calls that never wait.
_LOAD_DELAY_S = 0.05

R = TypeVar("R", bound=Replica)


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchSettings:
    """Retry limits of the dispatcher.

    `max_tries` bounds the tries of one call, `max_starts` the consecutive failed starts before waiting calls
    fail. A full instance is retried after `refused_s`, one that drains or has lost its engine after
    `draining_s`.
    """

    max_tries: int = 8
    max_starts: int = 3
    refused_s: float = 0.02
    draining_s: float = 0.25


@dataclass(slots=True)
class DispatchCounts:
    """Totals since this gateway started."""

    failovers: int = 0  # calls that continued elsewhere after their node was lost
    rerouted: int = 0  # calls that an instance rejected before it began
    moved: int = 0  # calls that a pipeline or an instance handed off


class CallDispatcher:
    """The dispatcher of all calls of this gateway.

    `pump` runs after every change of the state cache.
    """

    def __init__(
        self,
        cluster: ClusterContext,
        links: ChannelPool,
        progress: StartProgress,
        admission: Admission,
        demand: DemandPublisher,
        load: ChangeCondition,
        tokenizers: TokenizerSender,
        *,
        rng: random.Random | None = None,
        settings: DispatchSettings | None = None,
    ) -> None:
        self.slots = ReplicaSlots()
        self.counts = DispatchCounts()
        self.movable_calls = MovableCalls()
        self.deadlines = DeadlineTimer()
        self.tokenizers = tokenizers
        self._state_cache = cluster.state_cache
        self._changes = cluster.changes
        self.links = links
        self.client = links.client
        self._progress = progress
        self._admission = admission
        self._demand = demand
        self._load = load
        self.clock = cluster.clock
        self._rng = rng or random.Random()
        self._settings = settings or DispatchSettings()
        self.max_tries = self._settings.max_tries
        self._unservable = UnservableCalls(
            admission, cluster.state_cache, demand, cluster.clock, self._settings.max_starts
        )
        self._timers: dict[VersionKey, asyncio.TimerHandle] = {}
        self._idle = asyncio.Event()  # set once nothing is left, while draining
        cluster.changes.subscribe(self.pump)
        demand.on_failure(self.pump)

    def __repr__(self) -> str:
        return f"<CallDispatcher {self._admission!r} {self.slots!r}>"

    def run(self, call: FunctionCall) -> RequestExecution:
        return RequestExecution(self, call, self.clock)

    async def drain(self) -> None:
        """Admit no new calls; return once every call is over."""
        self._admission.draining = True
        if self._admission.calls:
            await self._idle.wait()

    # --- for RequestExecution

    def gpu_of(self, node: str) -> tuple[str, int]:
        entry = self._state_cache.node(node)
        return ("", 0) if entry is None else (entry.record.gpu_type, entry.record.gpu_count)

    def stage(self, key: VersionKey) -> WaitStage:
        return self._progress.stage(self._state_cache, key)

    def reroute(
        self, queued: QueuedRequest, outcome: ReplicaOutcome, *, failover: bool, has_kv: bool = False
    ) -> None:
        """Queue a call again in order of arrival, and record what the outcome shows of its replica.

        With `has_kv` its KV cache is still where a prefill instance has exported it.
        """
        instance = queued.instance
        assert instance is not None
        self._release(queued, instance)
        reserved = queued.reserved
        is_handed_off = outcome is ReplicaOutcome.MOVED and (
            isinstance(instance, InstanceRecord) or reserved is not None
        )
        if not is_handed_off or not has_kv or reserved not in self._state_cache.ready(queued.key):
            reserved = None
            self.unreserve(queued)
        match outcome:
            case ReplicaOutcome.MOVED | ReplicaOutcome.STAGE_LOST | ReplicaOutcome.GONE if isinstance(
                instance, PipelineReplica
            ):
                if not queued.goes_to and not is_handed_off:  # not requested here: the pipeline is closed
                    self._state_cache.live.close(instance.instance_id)
            case ReplicaOutcome.LOST:
                self.links.report_broken(instance.node)
            case ReplicaOutcome.DRAINING | ReplicaOutcome.STAGE_LOST:  # its record is about to change
                until = self.clock.monotonic_s() + self._settings.draining_s
                self.slots.back_off_until(instance.instance_id, until)
            case ReplicaOutcome.GONE if isinstance(instance, InstanceRecord):
                self._state_cache.apply(InstanceChanged(record=_stopped(instance)), self.clock.monotonic_s())
            case ReplicaOutcome.FULL:
                until = self.clock.monotonic_s() + self._settings.refused_s
                self.slots.back_off_until(instance.instance_id, until)
        if failover:
            self.counts.failovers += 1
        elif outcome is ReplicaOutcome.MOVED:
            self.counts.moved += 1
        else:
            self.counts.rerouted += 1
        self._admission.requeue(queued, handed_off=is_handed_off or (queued.handed_off and has_kv))
        if reserved is not None:  # with its slot
            queued.reserved = None
            queued.assigned_s = self.clock.monotonic_s()
            self._admission.assign(queued, reserved)
        self._demand.changed(urgent=True)
        self._changes.notify()  # the state cache changed

    def hands_off(self, key: VersionKey, server: Replica) -> bool:
        """Return whether a decode instance continues the replica's calls after their first token."""
        roles = self._state_cache.live.roles(key.function, key.version)
        return roles.get(server.instance_id) is InstanceRole.PREFILL and any(
            roles.get(one.instance_id) is InstanceRole.DECODE for one in self._state_cache.ready(key)
        )

    def reserve(self, queued: QueuedRequest) -> InstanceRecord | None:
        """Reserve a slot of a decode instance for a call of which the prompt runs, or has run in a pipeline.

        Returns None if none is free, or others wait for it.
        """
        roles = self._state_cache.live.roles(queued.key.function, queued.key.version)
        decoding = (one for one, role in roles.items() if role is InstanceRole.DECODE)
        return self._reserve(queued, frozenset(decoding))

    def reserve_elsewhere(self, queued: QueuedRequest) -> InstanceRecord | None:
        """Reserve a slot of another instance for a running call.

        Returns None if none is free, or calls wait for one that are not in the background.
        """
        key = queued.key
        if self._admission.queue(key).to_prefill:
            return None
        able = self._able(key, self._state_cache.ready(key), InstanceRole.DECODE)
        return self._reserve(queued, frozenset(one.instance_id for one in able))

    def _reserve(self, queued: QueuedRequest, among: Collection[str]) -> InstanceRecord | None:
        """Reserve a slot of one of these instances, if they are ready and it does not run there already."""
        key, queue = queued.key, self._admission.queue(queued.key)
        own = "" if queued.instance is None else queued.instance.instance_id
        able = [
            one for one in self._state_cache.ready(key) if one.instance_id in among and one.instance_id != own
        ]
        if queued.reserved is not None or queue.to_decode or not able:
            return queued.reserved
        tokens = CallTokens(kv=queued.tokens.kv)
        paced = None if self._paced(queued) is None else tokens
        chosen = self.slots.choose(able, self._rng, self.clock.monotonic_s(), paced=paced).instance
        if isinstance(chosen, InstanceRecord):
            self.slots.acquire(chosen.instance_id, queued.cost, tokens)
            queued.reserved = chosen
        return queued.reserved

    def unreserve(self, queued: QueuedRequest) -> None:
        """Free the slot that is reserved for a call, if any."""
        reserved, queued.reserved = queued.reserved, None
        if reserved is not None:
            self.slots.release(reserved.instance_id, queued.cost, CallTokens(kv=queued.tokens.kv))

    def on_first_token(self, queued: QueuedRequest) -> None:
        """Record the first token of a call on its replica, which may have room for another one now."""
        if queued.instance is not None and not queued.has_token:
            self._admission.on_first_token(queued)
            self.slots.on_first_token(slots_key_of(queued.instance), _to_run(queued))
            self._assign_held(self._admission.queue(queued.key))
            self.movable_calls.changed.notify()

    def on_tokens(self, queued: QueuedRequest, count: int, *, first: bool) -> None:
        """Count new tokens of a call; the time to its first one includes all waiting."""
        averages = self._admission.averages.of(queued.key)
        averages.output_tokens_in_all += count
        if first:
            averages.first_tokens += 1
            averages.first_token_s += self.clock.monotonic_s() - queued.arrived_s

    def traffic(self) -> dict[tuple[str, int], CallTraffic]:
        """Return what this gateway has served of each version."""
        return self._admission.averages.traffic()

    # --- calls come and go

    def enter(self, call: FunctionCall) -> QueuedRequest:
        if self._admission.draining:
            self._admission.check_open()
        key = VersionKey(call.version.function, call.version.version)
        state_cache = self._state_cache
        ready = state_cache.ready(key)
        now_s, serial = self.clock.monotonic_s(), state_cache.backoff.serial
        queued = QueuedRequest(call, key, now_s, serial, hot=bool(ready))
        self._admission.expect(queued)
        queue = self._admission.find(key)
        first = queue is None or not (queue.waiting if call.background else queue.to_prefill)
        if first and ready and not call.background and not state_cache.pipelines(key):
            able = self._able(key, ready, InstanceRole.PREFILL)
            if self._start(queued, able):
                return queued
        queue = self._admission.enqueue(queued)
        self._assign_ready(queue, state_cache.replicas(key))
        starts_to_wait = queued.instance is None and first
        # A paced call waits for a step or two of its instance: no reason for haste.
        urgent = starts_to_wait and (not ready or self._paced(queued) is None)
        self._demand.changed(urgent=urgent)
        if starts_to_wait:
            queue.stage = self.stage(key)
            self._unservable.reject(queue)
        if urgent:
            self._load.notify()  # a controller in this process starts what is missing
        else:
            self._load.notify_within(_LOAD_DELAY_S)
        return queued

    def leave(self, queued: QueuedRequest) -> None:
        self.unreserve(queued)
        if queued.instance is not None:
            self._release(queued, queued.instance)
        averages = self._admission.averages.of(queued.key)
        averages.count_end(is_error=queued.is_error)
        if queued.output_tokens:
            averages.record(queued.service_s, queued.output_tokens)
        queue = self._admission.leave(queued)
        self._demand.changed()
        if queue is not None:
            self._assign_held(queue)
        elif self._admission.draining and not self._admission.calls:
            self._idle.set()
        self._load.notify_within(_LOAD_DELAY_S)

    def _start(self, queued: QueuedRequest, ready: Sequence[InstanceRecord]) -> bool:
        """Start a call for which no other waits on an instance with a free slot; return False without one.

        Beside pipelines, and beyond an instance's limit, it goes through the queue, as all others.
        """
        paced = self._paced(queued)
        instance: Replica | None
        if paced is None:
            instance = self.slots.choose_ready(ready, self._rng, queued.arrived_s, queued.prefix)
        else:
            instance = self.slots.choose(
                ready, self._rng, queued.arrived_s, paced=paced, prefix=queued.prefix
            ).instance
        if instance is None:
            return False
        self.slots.acquire(instance.instance_id, queued.cost, _to_run(queued))
        self._admission.start(queued, instance)
        self._demand.changed()
        self._load.notify_within(_LOAD_DELAY_S)
        return True

    # --- assignment

    def pump(self) -> None:
        """Assign queued calls to replicas with free slots."""
        for queue in self._admission.queues():
            self._assign_held(queue)
            if queue.waiting and not self._state_cache.ready(queue.key):
                self._report_stage(queue)

    def _assign_held(self, queue: RequestQueue) -> None:
        if queue.waiting:
            self._assign_ready(queue, self._state_cache.replicas(queue.key))

    def _assign_ready(self, queue: RequestQueue, ready: Sequence[Replica]) -> None:
        now = self.clock.monotonic_s()
        if ready and queue.unready:
            queue.unready = False
            for queued in (*queue.to_prefill, *queue.background):
                queued.ready_s = now if queued.ready_s is None else queued.ready_s
        for queued in list(queue.moving.values()):
            self._move(queued, ready)
        if queue.to_decode:  # their clients already receive tokens
            self._fill(queue, queue.to_decode, self._able(queue.key, ready, InstanceRole.DECODE), now)
        able = self._able(queue.key, ready, InstanceRole.PREFILL)
        self._fill(queue, queue.to_prefill, able, now)
        if queue.background and not queue.to_prefill:
            self._fill(queue, queue.background, able, now)

    def _able(self, key: VersionKey, ready: Sequence[R], role: InstanceRole) -> Sequence[R]:
        """Return the replicas with this role, or without one; all if there are none."""
        roles = self._state_cache.live.roles(key.function, key.version)
        if not roles:
            return ready
        return [server for server in ready if roles.get(server.instance_id, role) is role] or ready

    def _fill(
        self,
        queue: RequestQueue,
        line: WeightedFairQueue[QueuedRequest],
        able: Sequence[Replica],
        now: float,
    ) -> None:
        """Assign calls of one of the queue's lines while replicas have room."""
        slots, behind = sum(map(concurrency_of, able)), line is queue.background
        while (following := line.first()) is not None:
            # Its tenant has the fewest calls in service: if it is not below its share, none is. For calls in
            # the background no other waits.
            needed = bool(queue.background.active) or line.is_below_share(following.tenant, slots)
            over_commit = following.batches and needed and not behind
            paced = self._paced(following)
            choice = self.slots.choose(
                able,
                self._rng,
                now,
                over_commit=over_commit,
                cost=following.cost,
                paced=paced,
                prefix=following.prefix,
                background=behind,
            )
            if choice.instance is None:
                if choice.next_at is not None:
                    self._assign_at(queue.key, choice.next_at - now)
                return
            self._assign(following, choice.instance)

    def _move(self, queued: QueuedRequest, ready: Sequence[Replica]) -> None:
        """Assign a handed-off call to its target instance, if that has a free slot.

        It goes before all others: it held a slot already, and its KV cache is not kept for long.
        """
        for server in ready:
            if server.instance_id == queued.goes_to and self.slots.room(server, over_commit=True) > 0:
                self._assign(queued, server)
                return

    def _paced(self, queued: QueuedRequest) -> CallTokens | None:
        """Return the tokens of a call by which its instances are filled; None where only calls count."""
        head = self._state_cache.functions.get(queued.key.function)
        by_load = head is not None and head.scaling.policy is ScalingMode.LOAD
        return _to_run(queued) if by_load and queued.tokens.prompt else None

    def _release(self, queued: QueuedRequest, server: Replica) -> None:
        """Free the call's slot of a replica that it leaves, and add its time there."""
        if isinstance(server, PipelineReplica):
            queued.service_s = None
        elif queued.service_s is not None:
            queued.service_s += self.clock.monotonic_s() - queued.assigned_s
        tokens = _to_run(queued)
        self.slots.release(slots_key_of(server), queued.cost, tokens, has_token=queued.has_token)

    def _assign(self, queued: QueuedRequest, server: Replica) -> None:
        self.slots.acquire(slots_key_of(server), queued.cost, _to_run(queued))
        queued.assigned_s = self.clock.monotonic_s()
        self._admission.assign(queued, server)

    def _assign_at(self, key: VersionKey, delay_s: float) -> None:
        if key not in self._timers:
            self._timers[key] = asyncio.get_running_loop().call_later(delay_s, self._on_timer, key)

    def _on_timer(self, key: VersionKey) -> None:
        del self._timers[key]
        queue = self._admission.find(key)
        if queue is not None:
            self._assign_held(queue)

    def _report_stage(self, queue: RequestQueue) -> None:
        """Reject calls that no start can serve, and report the start's progress to the others."""
        self._unservable.reject(queue)
        stage = self.stage(queue.key)
        if stage != queue.stage:
            queue.stage = stage
            for queued in queue.calls():
                queued.wake()


def _to_run(queued: QueuedRequest) -> CallTokens:
    """Return the tokens of a call on its next replica: of its prompt those that are to be run there."""
    return CallTokens(prompt=queued.waiting_tokens, kv=queued.tokens.kv)


def _stopped(instance: InstanceRecord) -> InstanceRecord:
    return InstanceRecord(
        instance_id=instance.instance_id,
        function=instance.function,
        version=instance.version,
        node=instance.node,
        state=InstanceState.STOPPED,
        start_kind=instance.start_kind,
        since=instance.since,
    )
