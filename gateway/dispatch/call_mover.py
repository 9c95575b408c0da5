"""Hands this gateway's calls off from pipelines as their members are promoted."""

import asyncio
import logging

from gateway.cluster.condition import ChangeCondition
from gateway.cluster.node_client import ChannelPool
from gateway.cluster.replicas import pipeline_replica
from gateway.cluster.state_cache import ClusterStateCache, VersionKey
from gateway.dispatch.pipeline_calls import PipelineCalls
from gateway.dispatch.router import ReplicaSlots
from registry.errors import ChannelError
from registry.messages.live import MAX_LEAVING, HandOffCalls
from registry.records.live import LivePipeline, LiveSwitch

log = logging.getLogger(__name__)

_HAND_OFF_TIMEOUT_S = 5.0


class CallMover:
    """The task that moves calls to promoted members, once for each, when its instance is ready."""

    def __init__(
        self,
        state_cache: ClusterStateCache,
        changes: ChangeCondition,
        links: ChannelPool,
        calls: PipelineCalls,
        slots: ReplicaSlots,
    ) -> None:
        self._state_cache = state_cache
        self._changes = changes
        self._links = links
        self._calls = calls
        self._slots = slots
        self._done: set[tuple[str, str]] = set()

    def __repr__(self) -> str:
        return f"<CallMover {self._calls!r}>"

    async def run(self) -> None:
        """Move calls until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                for pipeline, leaving in self._due():
                    group.create_task(self._leave(pipeline, leaving), name=f"leave {pipeline.name}")
                await self._changes.wait()

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
