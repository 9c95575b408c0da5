"""Calls of the control side to nodes: start, stop, warm, drop, logs, status."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager

from gateway.cluster.node_client import ChannelPool, NodeClient
from gateway.cluster.start_assets import StartAssets
from gateway.cluster.state_cache import ClusterStateCache
from gateway.planning.actions import StartAction, StopAction
from gateway.planning.cast_publisher import CastPublisher
from gateway.planning.groups import LayerSizes, layer_sizes
from registry.config.function_secrets import SecretVault
from registry.errors import ChannelClosed, ChannelError, InvalidRecord, NotFound, RegistryError, RemoteError
from registry.images.codec import decode_manifest
from registry.messages.arrivals import Arrivals, FollowArrivals
from registry.messages.images import (
    CheckModel,
    CloseFolders,
    DropImage,
    ImageHolder,
    LinkPeer,
    ModelChecked,
    ModelFolder,
    PrepareLinks,
    PullModel,
    UnpinImage,
    WarmImage,
)
from registry.messages.node import (
    CordonNode,
    GetStatus,
    InstanceProgress,
    InstanceStarted,
    LogChunk,
    NodeStatus,
    Request,
    StartInstance,
    StopInstance,
    TailLogs,
)
from registry.records.cast import CastRecord
from registry.records.engine import EngineKind
from registry.records.fence import Fence
from registry.records.function import FunctionVersion
from registry.records.instance import InstanceGroup

# How long a start waits for the first bytes on the node that it pulls the image from.
_ARRIVAL_S = 30.0

log = logging.getLogger(__name__)


class SourceLost(RegistryError):
    """The node that was to provide the image did not receive it."""


class LoadingImage:
    """An image that is loading on a node; `started` is set at its first bytes or at its end."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.failed = False


class NodeCalls:
    """Calls to nodes. Raise ChannelClosed (node lost), RemoteError, for blobs NotFound and ImageError.

    A start raises NotFound for secrets that are missing or cannot be decrypted.

    A node that pulls an image from a node on which it is still loading is called after the first bytes
    arrived there: before that the source does not know the image, and the store would be read twice.
    """

    def __init__(
        self,
        links: ChannelPool,
        state_cache: ClusterStateCache,
        assets: StartAssets,
        casts: CastPublisher,
        vault: SecretVault,
    ) -> None:
        self._links = links
        self._state_cache = state_cache
        self._assets = assets
        self._casts = casts
        self._vault = vault
        self._arrivals: dict[tuple[str, str], LoadingImage] = {}

    async def start(self, action: StartAction, fence: Fence) -> AsyncGenerator[InstanceProgress, None]:
        """Start an instance; yield progress until it is ready."""
        version = action.version
        request = StartInstance(
            instance_id=action.instance_id,
            function=version.function,
            version=version.version,
            task=version.task.value,
            dtype=version.dtype,
            context_length=version.context_length,
            max_concurrency=action.max_concurrency,
            assets=await self._assets.files(version),
            image=await self._assets.image_ref(version, action.holders, action.cast),
            controller_epoch=fence.epoch,
            controller_incarnation=fence.incarnation,
            live=action.live,
            first_layer=action.first_layer,
            host_copy=action.host_copy,
            secrets=await self._secrets(version),
            engine=version.engine,
            engine_args=version.engine_args,
            native_first=version.native_first,
            group=action.group,
            channels=self._channels_of(action.group),
        )
        with self._arriving(version.image if action.loads_whole else None, action.node) as arrival:
            async with self._casts.joining(action.cast, action.node):
                await self._wait_for_source(version.image, action.holders)
                started = False
                async with self._client(action.node).call(request) as replies:
                    async for reply in replies:
                        if isinstance(reply, InstanceProgress):
                            if reply.fraction > 0:
                                arrival.started.set()
                            yield reply
                        started = isinstance(reply, InstanceStarted)
                if not started:
                    raise RemoteError("internal", f"node {action.node} ended the start without a result")

    def _channels_of(self, group: InstanceGroup | None) -> tuple[str, ...]:
        """Return the channels of a group's members. Raises ChannelClosed if one is lost."""
        channels = []
        for member in () if group is None else group.members:
            entry = self._state_cache.node(member.node)
            if entry is None:
                raise ChannelClosed(f"node {member.node} of the group is lost")
            channels.append(entry.record.channel)
        return tuple(channels)

    async def layers(self, version: FunctionVersion) -> LayerSizes | None:
        """Return the sizes of the version's layers, None if its image cannot be divided by layers."""
        image = await self._assets.image_ref(version, ())
        return None if image is None else layer_sizes(decode_manifest(image.manifest_bytes))

    async def _secrets(self, version: FunctionVersion) -> dict[str, str]:
        try:
            return await self._vault.values(version.function, version.secrets)
        except (NotFound, InvalidRecord) as error:
            log.warning("%s:%d cannot start: %s", version.function, version.version, error)
            # Callers see this, of other tenants too.
            raise NotFound("a secret that this version needs is not set, or cannot be decrypted") from None

    async def stop(self, action: StopAction) -> None:
        """Drain and stop an instance; return when it has stopped."""
        await self._call(action.node, StopInstance(instance_id=action.instance_id, grace_s=action.grace_s))

    async def warm(
        self,
        version: FunctionVersion,
        node: str,
        holders: tuple[ImageHolder, ...],
        *,
        cast: CastRecord | None = None,
        pin: bool = False,
        preserve_pinned: bool = False,
    ) -> AsyncGenerator[InstanceProgress, None]:
        """Bring the version's image into the node's host tier; yield progress until it is complete."""
        image = await self._assets.image_ref(version, holders, cast)
        if image is None:
            return
        request = WarmImage(
            image=image,
            function=version.function,
            version=version.version,
            pin=pin,
            preserve_pinned=preserve_pinned,
        )
        with self._arriving(version.image, node) as arrival:
            async with self._casts.joining(cast, node):
                await self._wait_for_source(version.image, holders)
                async with self._client(node).call(request) as replies:
                    async for reply in replies:
                        if isinstance(reply, InstanceProgress):
                            if reply.fraction > 0:
                                arrival.started.set()
                            yield reply

    async def check(self, version: FunctionVersion, node: str) -> bool:
        """Check that the node has the version's engine; return whether its own engine runs the model, too.

        Raises RemoteError (`unsupported_model`).
        """
        image = await self._assets.image_ref(version, ())
        assert image is not None
        config = await self._assets.file(version, "config.json")
        natively = version.engine is EngineKind.NATIVE
        async with self._client(node).call(
            CheckModel(
                image=image,
                config=config,
                dtype=version.dtype,
                context_length=version.context_length,
                engine=version.engine,
                engine_args=version.engine_args,
            )
        ) as replies:
            async for reply in replies:
                if isinstance(reply, ModelChecked):
                    natively = reply.natively
        return natively

    async def pull(self, version: FunctionVersion, node: str) -> str:
        """Return the folder on the node's machine with the files and the image, which is in its host tier."""
        files = {name: await self._assets.file(version, name) for name in version.assets}
        name = f"{version.function}-{version.version}"
        request = PullModel(name=name, image=version.image or "", files=files)
        async with self._client(node).call(request) as replies:
            async for reply in replies:
                if isinstance(reply, ModelFolder):
                    return reply.path
        raise RemoteError("internal", f"node {node} returned no folder")

    async def unpin(self, image: str, node: str) -> None:
        """Unpin the host copy of the image."""
        await self._call(node, UnpinImage(image=image))

    async def prepare_links(self, node: str, peers: tuple[LinkPeer, ...]) -> None:
        """Have the node connect to peers."""
        await self._call(node, PrepareLinks(peers=peers))

    async def cordon(self, node: str, *, cordoned: bool) -> None:
        """Have the node publish whether further instances may be started there."""
        await self._call(node, CordonNode(cordoned=cordoned))

    async def close_folders(self, image: str, node: str) -> None:
        """Remove the node's folders of the image, which its host cannot evict before."""
        await self._call(node, CloseFolders(image=image))

    async def drop(self, image: str, node: str, tier: str) -> None:
        """Drop the idle image from the tier."""
        await self._call(node, DropImage(image=image, tier=tier))

    async def refresh(self, node: str) -> None:
        """Read the node's record now, before its next heartbeat; a failure leaves the cached one."""
        try:
            async with self._client(node).call(GetStatus()) as replies:
                async for reply in replies:
                    if isinstance(reply, NodeStatus):
                        self._state_cache.refresh(reply.record)
        except ChannelError:
            return

    async def arrivals(self, node: str) -> AsyncGenerator[Arrivals, None]:
        """Yield what is arriving on the node, until closed."""
        async with self._client(node).call(FollowArrivals()) as replies:
            async for reply in replies:
                if isinstance(reply, Arrivals):
                    yield reply

    async def logs(
        self, node: str, function: str, since_version: int, lines: int, follow: bool
    ) -> AsyncGenerator[str, None]:
        """Yield log lines of the function."""
        request = TailLogs(function=function, since_version=since_version, lines=lines, follow=follow)
        async with self._client(node).call(request) as replies:
            async for reply in replies:
                if isinstance(reply, LogChunk):
                    for line in reply.lines:
                        yield line

    @contextmanager
    def _arriving(self, image: str | None, node: str) -> Iterator[LoadingImage]:
        """Record that the image is loading on the node, for calls that pull from it."""
        arrival = LoadingImage()
        if image is None or (image, node) in self._arrivals:  # no image, or it is loading by another call
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
            arrival.started.set()

    async def _wait_for_source(self, image: str | None, holders: tuple[ImageHolder, ...]) -> None:
        """Wait until the first holder has bytes of the image. Raises SourceLost."""
        arrival = self._arrivals.get((image, holders[0].node)) if image and holders else None
        if arrival is None:
            return
        try:
            async with asyncio.timeout(_ARRIVAL_S):
                await arrival.started.wait()
        except TimeoutError:
            return  # the node then tries by itself
        if arrival.failed:
            raise SourceLost(f"the image did not arrive on {holders[0].node}")

    async def _call(self, node: str, request: Request) -> None:
        async with self._client(node).call(request) as replies:
            async for _ in replies:
                pass

    def _client(self, node: str) -> NodeClient:
        client = self._links.client(node)
        if client is None:
            raise ChannelClosed(f"no channel to node {node}")
        return client
