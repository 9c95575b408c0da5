"""Moves this gateway's calls off pipelines, as members come to serve alone."""

import asyncio
import logging

from gateway.directory import Directory, VersionKey
from gateway.live_calls import LiveCalls
from gateway.node_client import Links
from gateway.router import Slots
from gateway.servers import server_of
from gateway.wakeup import Wakeup
from registry.errors import ChannelError
from registry.live import LivePipeline, LiveSwitch
from registry.live_messages import MAX_LEAVING, LeaveCalls

log = logging.getLogger(__name__)

_SEND_S = 5.0


class LiveMoves:
    """`run` carries the moves out. Each switch of a member is heeded once, when its instance takes calls."""

    def __init__(
        self, directory: Directory, changes: Wakeup, links: Links, calls: LiveCalls, slots: Slots
    ) -> None:
        self._directory = directory
        self._changes = changes
        self._links = links
        self._calls = calls
        self._slots = slots
        self._done: set[tuple[str, str]] = set()

    def __repr__(self) -> str:
        return f"<LiveMoves {self._calls!r}>"

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
        for record in self._directory.live:
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
        """The calls that go to the instance; None while it does not take any."""
        for instance in self._directory.ready(key):
            if instance.instance_id == switch.instance_id:
                # Calls that run in the pipeline go before those that wait for their first token in a lane:
                # somebody reads them. What it has no room for moves with the pipeline's end at the latest.
                room = self._slots.room(instance)
                leaving = self._calls.share(pipeline.name, switch.instance_id, switch.sharers, room)
                return leaving.call_ids
        return None

    async def _leave(self, pipeline: LivePipeline, call_ids: tuple[str, ...]) -> None:
        head = server_of(pipeline).node
        log.info("%d calls of pipeline %s go to where they are served alone", len(call_ids), pipeline.name)
        for start in range(0, len(call_ids), MAX_LEAVING):
            batch = call_ids[start : start + MAX_LEAVING]
            request = LeaveCalls(pipeline=pipeline.pipeline_id, epoch=pipeline.epoch, request_ids=batch)
            client = self._links.client(head)
            if client is None:
                return  # then they go on elsewhere without being asked
            try:
                async with asyncio.timeout(_SEND_S), client.call(request) as replies:
                    async for _ in replies:
                        pass
            except (ChannelError, TimeoutError) as error:
                log.info("calls of pipeline %s stay there: %r", pipeline.name, error)
                return
