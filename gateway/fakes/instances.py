"""The part of a FakeNode that starts and stops instances."""

import asyncio
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from gateway.fakes.channel import Send
from rdmacast.aio.groups import cancel_and_wait
from registry.errors import RemoteError
from registry.messages.node import (
    Acknowledged,
    InstanceProgress,
    InstanceStarted,
    StartInstance,
    StopInstance,
)
from registry.records.instance import InstanceRecord, InstanceState, StartKind
from registry.records.node import Tier

if TYPE_CHECKING:
    from gateway.fakes.node import FakeNode


@dataclass(slots=True)
class FakeInstance:
    record: InstanceRecord
    image: str | None
    running: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    settled: asyncio.Event = field(default_factory=asyncio.Event)  # ready, or removed


class FakeInstances:
    """A fake node's instances by id. A start outlives its request, and a repeated request joins it.

    A member of a group is ready by itself. Without grace a stop does not wait for calls.
    """

    def __init__(self, host: "FakeNode") -> None:
        self._host = host
        self._all: dict[str, FakeInstance] = {}
        self._starting: set[asyncio.Task[None]] = set()

    def get(self, instance_id: str) -> FakeInstance | None:
        return self._all.get(instance_id)

    def clear(self) -> None:
        """Drop all instances, as the node dies."""
        for start in self._starting:
            start.cancel()
        for instance in self._all.values():
            instance.settled.set()
        self._all.clear()

    async def lose(self, node: str) -> None:
        """Fail the leaders of groups with a member on a node that is lost."""
        for id_, instance in list(self._all.items()):
            if any(helper.node == node for helper in instance.record.helpers) and instance.record.takes_calls:
                del self._all[id_]
                instance.settled.set()
                await self._publish(instance, InstanceState.FAILED)

    async def start(self, request: StartInstance, send: Send) -> None:
        known = self._all.get(request.instance_id)
        if known is not None:
            self._host.counts["joins"] += 1
            await self._join(known, request, send)
            return
        start = asyncio.create_task(self._start(request, send))
        self._starting.add(start)
        start.add_done_callback(self._starting.discard)
        await asyncio.shield(start)

    async def stop(self, request: StopInstance, send: Send) -> None:
        self._host.counts["stops"] += 1
        instance = self._all.get(request.instance_id)
        if instance is None:
            raise RemoteError("no_such_instance", request.instance_id)
        await self._publish(instance, InstanceState.DRAINING)
        if instance.running and request.grace_s:
            await instance.idle.wait()
        del self._all[request.instance_id]
        instance.settled.set()
        if instance.image is not None and all(one.image != instance.image for one in self._all.values()):
            await self._host.drop(instance.image, Tier.GPU)
        await self._publish(instance, InstanceState.STOPPED)
        await send(Acknowledged())

    async def _join(self, instance: FakeInstance, request: StartInstance, send: Send) -> None:
        reporting = asyncio.create_task(self._host.layers.report(send)) if request.live else None
        try:
            await instance.settled.wait()
        finally:
            await _ended(reporting)
        if instance.record.state is not InstanceState.READY:
            raise RemoteError("start_failed", f"{request.instance_id} has ended")
        await send(_started(instance.record))

    async def _start(self, request: StartInstance, send: Send) -> None:
        host = self._host
        host.counts["starts"] += 1
        if host.start_error is not None:
            raise host.start_error
        image = request.image
        is_warm = image is None or host.holds(image.image, Tier.HOST)
        record = InstanceRecord(
            instance_id=request.instance_id,
            function=request.function,
            version=request.version,
            node=host.id,
            state=InstanceState.STARTING,
            start_kind=StartKind.WARM if is_warm else StartKind.COLD,
            since=1.0,
            max_concurrency=request.max_concurrency,
            group=request.group,
        )
        instance = FakeInstance(record=record, image=None if image is None else image.image)
        self._all[request.instance_id] = instance
        await self._publish(instance, InstanceState.STARTING)
        await self._publish(instance, InstanceState.LOADING)
        await send(InstanceProgress(stage="reserve", fraction=0.0))
        if image is not None:
            reporting = asyncio.create_task(host.layers.report(send)) if request.live else None
            try:
                await host.fetch(image, send)
            finally:
                await _ended(reporting)
            if request.group is None:  # a part is no copy
                await host.hold(image.image, Tier.HOST, image.nbytes)
                await host.hold(image.image, Tier.GPU, image.nbytes)
        await self._publish(instance, InstanceState.READY)
        instance.settled.set()
        await send(_started(instance.record))

    async def _publish(self, instance: FakeInstance, state: InstanceState) -> None:
        instance.record = replace(instance.record, state=state)
        await self._host.publish(instance.record)


async def _ended(reporting: asyncio.Task[None] | None) -> None:
    if reporting is not None:
        await cancel_and_wait(reporting)


def _started(record: InstanceRecord) -> InstanceStarted:
    return InstanceStarted(instance_id=record.instance_id, start_kind=record.start_kind.value, phases_ms={})
