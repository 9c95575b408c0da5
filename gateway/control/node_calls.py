"""The calls that gateways make to nodes besides requests: start, stop, warm, drop, logs, status."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager

from gateway.actions import StartOn, StopOn
from gateway.cast_records import CastRecords
from gateway.directory import Directory
from gateway.node_client import Links, NodeClient
from gateway.start_assets import StartAssets
from registry.cast import CastRecord
from registry.errors import ChannelClosed, ChannelError, RegistryError, RemoteError
from registry.function import FunctionVersion
from registry.messages import (
    DropImage,
    GetStatus,
    Holder,
    InstanceProgress,
    InstanceStarted,
    LogLines,
    NodeStatus,
    Request,
    StartInstance,
    StopInstance,
    TailLogs,
    UnkeepImage,
    WarmImage,
)

# How long a start waits for the first bytes on the node that it takes the image from.
_ARRIVAL_S = 30.0


class SourceGone(RegistryError):
    """The node that was to give the image did not get it either."""


class Arrival:
    """Bytes of an image on their way to a node: `begun` once some are there or the load ended."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.failed = False


class NodeCalls:
    """A node that takes an image from another on which it is only arriving is called once bytes are
    there: before that the other would not know the image, and the store would be read twice.

    Every method raises ChannelClosed (node lost), RemoteError, and where it reads blobs also NotFound
    and ImageError."""

    def __init__(self, links: Links, directory: Directory, assets: StartAssets, casts: CastRecords) -> None:
        self._links = links
        self._directory = directory
        self._assets = assets
        self._casts = casts
        self._arrivals: dict[tuple[str, str], Arrival] = {}

    async def start(self, action: StartOn, controller_epoch: int) -> AsyncGenerator[InstanceProgress, None]:
        """Start an instance; ends when it is ready."""
        version = action.version
        request = StartInstance(
            instance_id=action.instance_id,
            function=version.function,
            version=version.version,
            task=version.task.value,
            architecture=version.architecture,
            dtype=version.dtype,
            context_length=version.context_length,
            max_concurrency=action.max_concurrency,
            assets=await self._assets.files(version),
            image=await self._assets.image_ref(version, action.holders, action.cast),
            controller_epoch=controller_epoch,
            live=action.live,
            first_layer=action.first_layer,
        )
        with self._arriving(version.image, action.node) as arrival:
            async with self._casts.part(action.cast, action.node):
                await self._source(version.image, action.holders)
                started = False
                async with self._client(action.node).call(request) as replies:
                    async for reply in replies:
                        if isinstance(reply, InstanceProgress):
                            if reply.fraction > 0:
                                arrival.begun.set()
                            yield reply
                        started = isinstance(reply, InstanceStarted)
                if not started:
                    raise RemoteError("internal", f"node {action.node} ended the start without a word")

    async def stop(self, action: StopOn) -> None:
        """Drain and stop an instance; returns when it is gone."""
        await self._do(action.node, StopInstance(instance_id=action.instance_id, grace_s=action.grace_s))

    async def warm(
        self,
        version: FunctionVersion,
        node: str,
        holders: tuple[Holder, ...],
        *,
        cast: CastRecord | None = None,
        keep: bool = False,
        yielding: bool = False,
    ) -> AsyncGenerator[InstanceProgress, None]:
        """Bring the version's image into the node's host tier; ends when it is there."""
        image = await self._assets.image_ref(version, holders, cast)
        if image is None:
            return
        request = WarmImage(image=image, function=version.function, keep=keep, yielding=yielding)
        with self._arriving(version.image, node) as arrival:
            async with self._casts.part(cast, node):
                await self._source(version.image, holders)
                async with self._client(node).call(request) as replies:
                    async for reply in replies:
                        if isinstance(reply, InstanceProgress):
                            if reply.fraction > 0:
                                arrival.begun.set()
                            yield reply

    async def unkeep(self, image: str, node: str) -> None:
        await self._do(node, UnkeepImage(image=image))

    async def drop(self, image: str, node: str, tier: str) -> None:
        await self._do(node, DropImage(image=image, tier=tier))

    async def refresh(self, node: str) -> None:
        """Learn the node's record now rather than with its next heartbeat. A failure leaves the old one."""
        try:
            async with self._client(node).call(GetStatus()) as replies:
                async for reply in replies:
                    if isinstance(reply, NodeStatus):
                        self._directory.refresh(reply.record)
        except ChannelError:
            return

    async def logs(self, node: str, function: str, lines: int, follow: bool) -> AsyncGenerator[str, None]:
        request = TailLogs(function=function, lines=lines, follow=follow)
        async with self._client(node).call(request) as replies:
            async for reply in replies:
                if isinstance(reply, LogLines):
                    for line in reply.lines:
                        yield line

    @contextmanager
    def _arriving(self, image: str | None, node: str) -> Iterator[Arrival]:
        """While this is held others see that the image is on its way to the node."""
        arrival = Arrival()
        if image is None or (image, node) in self._arrivals:  # nothing comes, or by another call
            yield arrival
            return
        self._arrivals[image, node] = arrival
        try:
            yield arrival
        except BaseException:
            arrival.failed = True
            raise
        finally:
            del self._arrivals[image, node]
            arrival.begun.set()

    async def _source(self, image: str | None, holders: tuple[Holder, ...]) -> None:
        """Wait until the first holder has something to give. Raises SourceGone."""
        arrival = self._arrivals.get((image, holders[0].node)) if image and holders else None
        if arrival is None:
            return
        try:
            async with asyncio.timeout(_ARRIVAL_S):
                await arrival.begun.wait()
        except TimeoutError:
            return  # then the node sees for itself
        if arrival.failed:
            raise SourceGone(f"the image did not arrive on {holders[0].node}")

    async def _do(self, node: str, request: Request) -> None:
        async with self._client(node).call(request) as replies:
            async for _ in replies:
                pass

    def _client(self, node: str) -> NodeClient:
        client = self._links.client(node)
        if client is None:
            raise ChannelClosed(f"no channel to node {node}")
        return client
