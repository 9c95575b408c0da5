"""Moves this gateway's running calls: from pipelines to promoted members, and off instances that stop."""

import asyncio
import logging

from gateway.cluster.condition import ChangeCondition
from gateway.cluster.node_client import ChannelPool
from gateway.cluster.replicas import pipeline_replica
from gateway.cluster.state_cache import ClusterStateCache, VersionKey
from gateway.dispatch.movable_calls import MovableCalls
from gateway.dispatch.router import ReplicaSlots
from registry.errors import ChannelError
from registry.messages.live import MAX_LEAVING, HandOffCalls
from registry.records.live import LivePipeline, LiveSwitch

log = logging.getLogger(__name__)

_HAND_OFF_TIMEOUT_S = 5.0
_LEAVING = 2  # calls that leave an instance at a time: one is exported while the other one arrives


class CallMover:
    """The task that moves running calls.

    Those of a pipeline move to promoted members, once for each, when its instance is ready. With `empties`
    generations also leave an instance that takes no more calls, a few at a time, while another instance has
    room and no call waits: it ends as soon as it has none.
    """

    def __init__(
        self,
        state_cache: ClusterStateCache,
        changes: ChangeCondition,
        links: ChannelPool,
        calls: MovableCalls,
        slots: ReplicaSlots,
        *,
        empties: bool = True,
    ) -> None:
        self._state_cache = state_cache
        self._changes = changes
        self._links = links
        self._calls = calls
        self._slots = slots
        self._empties = empties
        self._done: set[tuple[str, str]] = set()
        self._emptying: set[str] = set()
        changes.subscribe(calls.changed.notify)

    def __repr__(self) -> str:
        return f"<CallMover {self._calls!r}>"

    async def run(self) -> None:
        """Move calls until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                for pipeline, leaving in self._due():
                    group.create_task(self._leave(pipeline, leaving), name=f"leave {pipeline.name}")
                for instance_id in self._to_empty():
                    group.create_task(self._empty(instance_id), name=f"empty {instance_id}")
                await self._changes.wait()

    def _to_empty(self) -> list[str]:
        """Return the instances that stop with calls, and are not being emptied yet."""
        if not self._empties:
            return []
        held = [one for one in self._calls.replicas if one not in self._emptying]
        return [one for one in held if self._state_cache.is_emptying(one)]

    async def _empty(self, instance_id: str) -> None:
        """Move calls off an instance until it has none, or takes calls again."""
        self._emptying.add(instance_id)
        try:
            moved = sum(await asyncio.gather(*(self._move_off(instance_id) for _ in range(_LEAVING))))
        finally:
            self._emptying.discard(instance_id)
        if moved:
            log.info("%d calls of instance %s have moved to others", moved, instance_id)

    async def _move_off(self, instance_id: str) -> int:
        """Move calls off an instance one after the other; return how many."""
        moved = 0
        while self._state_cache.is_emptying(instance_id) and (calls := self._calls.on(instance_id)):
            for call in calls:
                if await call.leave_instance():
                    moved += 1
                    break
            else:
                await self._calls.changed.wait()
        return moved

    def _due(self) -> list[tuple[LivePipeline, tuple[str, ...]]]:
        due = []
        there: set[tuple[str, str]] = set()
        for record in self._state_cache.live:
            key = VersionKey(record.function, record.version)
            for pipeline in record.pipelines:
                for switch in pipeline.switched:
                    place = pipeline.name, switch.instance_id
                    there.add(place)
                    if place in self._done:
                        continue
                    taken = self._taken(key, pipeline, switch)
                    if taken is not None:
                        self._done.add(place)
                        if taken:
                            due.append((pipeline, taken))
        self._done &= there
        return due

    def _taken(self, key: VersionKey, pipeline: LivePipeline, switch: LiveSwitch) -> tuple[str, ...] | None:
        """Return the ids of the calls that move to the instance; None while it is not ready."""
        for instance in self._state_cache.ready(key):
            if instance.instance_id == switch.instance_id:
                # Running calls go before queued ones: their clients already receive tokens. The rest moves at
                # the end of the pipeline at the latest.
                room = self._slots.room(instance)
                leaving = self._calls.share(pipeline.name, switch.instance_id, switch.sharers, room)
                return leaving.call_ids
        return None

    async def _leave(self, pipeline: LivePipeline, call_ids: tuple[str, ...]) -> None:
        head = pipeline_replica(pipeline).node
        log.info("%d calls of pipeline %s move to a promoted member", len(call_ids), pipeline.name)
        for start in range(0, len(call_ids), MAX_LEAVING):
            batch = call_ids[start : start + MAX_LEAVING]
            request = HandOffCalls(pipeline=pipeline.pipeline_id, epoch=pipeline.epoch, request_ids=batch)
            client = self._links.client(head)
            if client is None:
                return  # its calls are routed again anyway
            try:
                async with asyncio.timeout(_HAND_OFF_TIMEOUT_S), client.call(request) as replies:
                    async for _ in replies:
                        pass
            except (ChannelError, TimeoutError) as error:
                log.info("calls of pipeline %s were not moved: %r", pipeline.name, error)
                return
