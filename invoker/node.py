"""The node: handles requests from gateways and reports its state."""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

from invoker.base.counters import Counters
from invoker.base.errors import InvokerError, NodeDraining, PipelineLost, StartFailed, StartStopped
from invoker.device import DeviceFacts
from invoker.engine.contract import EngineError
from invoker.handlers.errors import HandlerError
from invoker.host_tier.model_folders import ModelFolders
from invoker.host_tier.tier import HostTier
from invoker.instances.arrival_feed import follow_arrivals
from invoker.instances.calls import Calls, keep_metering
from invoker.instances.device_cache import DeviceCache
from invoker.instances.load_feed import LoadFeed
from invoker.instances.manager import Instances
from invoker.kv.transfer import KvConnector
from invoker.live.hosted import HostedStages
from invoker.live.pipelines import HostedPipelines
from invoker.loading.disk_cache import DiskCache
from invoker.loading.disk_writer import DiskWriter
from invoker.loading.loader import ImageLoader
from invoker.loading.progress import LayerReports, ProgressThrottle
from invoker.loading.published import PublishedImages
from invoker.log_rings import LogRings
from invoker.memory.arena import Arena
from invoker.metering.meter import GpuMeter
from invoker.serving import (
    compute,
    forward,
    generate,
    generate_by,
    invoke_handler,
    leave_instance,
    prefetch_kv,
)
from invoker.settings import Settings
from invoker.traces.calls import Work, name_in_logs
from invoker.traces.node import NodeTracing
from rdmacast.aio.threads import run_in_thread
from rdmacast.cast.links import CastLinks
from rdmacast.errors import CastError
from rdmacast.link_rate import LinkRate
from rdmacast.transport import PeerAddress
from registry.clock import Clock
from registry.errors import RegistryError, RemoteError
from registry.messages.arrivals import FollowArrivals
from registry.messages.forward import ForwardRequest
from registry.messages.images import (
    AddTokenizer,
    CheckModel,
    CloseFolders,
    DropImage,
    ModelChecked,
    ModelFolder,
    PrepareLinks,
    PullModel,
    UnpinImage,
    WarmImage,
)
from registry.messages.live import (
    HandOffCalls,
    LeaveInstance,
    LinkStage,
    OpenPipeline,
    OpenStage,
    PrefetchKv,
    encode_layer_set,
)
from registry.messages.node import (
    Acknowledged,
    CallsUsed,
    Compute,
    CordonNode,
    EndCalls,
    Generate,
    GetStatus,
    InstanceProgress,
    InstanceStarted,
    InvokeHandler,
    LogChunk,
    NodeLoads,
    NodeStatus,
    Reply,
    Request,
    SettleCalls,
    StartInstance,
    StopInstance,
    TailLogs,
)
from registry.records.engine import EngineKind
from registry.records.instance import InstanceState
from registry.records.node import CachedImage, NodeRecord, NodeState, Tier

log = logging.getLogger("invoker.node")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDependencies:
    """Dependencies of a node, built by `invoker.assembly`."""

    settings: Settings
    facts: DeviceFacts
    clock: Clock
    arena: Arena
    tier: HostTier
    folders: ModelFolders
    device_cache: DeviceCache
    published: PublishedImages
    loader: ImageLoader
    instances: Instances
    loads: LoadFeed
    stages: HostedStages
    pipelines: HostedPipelines
    kv_connector: KvConnector
    meter: GpuMeter
    calls: Calls
    rings: LogRings
    counters: Counters
    cast_sent_bytes: Callable[[], int]
    quarantined_bytes: Callable[[], int]
    changed: Callable[[], None]
    links: CastLinks
    disk: DiskCache | None
    disk_writer: DiskWriter | None
    port_rate: LinkRate | None
    engines: tuple[EngineKind, ...]
    tracing: NodeTracing | None = None


class Node:
    """Handles requests of one node. Belongs to the event loop's thread; does not own its dependencies."""

    def __init__(self, dependencies: NodeDependencies, epoch: int) -> None:
        self._dependencies = dependencies
        self._epoch = epoch
        self._started_at = dependencies.clock.wall_s()
        self._state = NodeState.READY
        self._cordoned = False
        self._channel_url = ""
        self._logs_context = dependencies.settings.log_format == "json"
        self._cast_url = ""

    def __repr__(self) -> str:
        return f"<Node {self._dependencies.settings.node_id} {self._state} {self._dependencies.instances!r}>"

    def listening(self, channel_url: str, cast_url: str) -> None:
        """Set the addresses of this node's servers."""
        self._channel_url, self._cast_url = channel_url, cast_url

    async def keep_metering(self) -> None:
        """Journal elapsed time; never returns."""
        dependencies = self._dependencies
        await keep_metering(dependencies.meter, dependencies.calls, dependencies.settings.meter_interval_s)

    def longest_step_us(self) -> int:
        """Return the age of the longest running engine step."""
        return self._dependencies.meter.longest_step_us()

    async def drain(self) -> None:
        """Refuse new requests, and let running ones finish within the grace period."""
        self._state = NodeState.DRAINING
        self._dependencies.changed()
        await self._dependencies.instances.drain(self._dependencies.settings.grace_s)
        await self._dependencies.calls.close()

    def record(self) -> NodeRecord:
        """Return the node's current record; the images in it are served to other nodes."""
        dependencies = self._dependencies
        holdings, port = self._holdings(), dependencies.port_rate
        in_memory = {one.image: one.bytes for one in holdings if one.tiers != (Tier.DISK,)}
        dependencies.published.publish_all(in_memory)
        return NodeRecord(
            id=dependencies.settings.node_id,
            host=dependencies.settings.host_id,
            pid=os.getpid(),
            epoch=self._epoch,
            state=self._state,
            device=dependencies.facts.device,
            gpu_type=dependencies.facts.gpu_type,
            gpu_count=dependencies.facts.gpu_count,
            channel=self._channel_url,
            cast=self._cast_url,
            gpu_bytes=dependencies.arena.capacity_bytes,
            gpu_free_bytes=dependencies.arena.free_bytes,
            gpu_largest_free_bytes=dependencies.arena.largest_free_bytes,
            gpu_largest_room_bytes=dependencies.device_cache.largest_room_bytes,
            host_bytes=dependencies.tier.limit_bytes,
            host_free_bytes=max(0, dependencies.tier.limit_bytes - dependencies.tier.used_bytes()),
            reads_store=dependencies.loader.reads_store,
            allows_handlers=dependencies.settings.allow_handlers,
            link_rate_bytes_s=dependencies.settings.link_rate_bytes_s,
            port_rate_bytes_s=None if port is None else int(port.bytes_per_s),
            started_at=self._started_at,
            controller=dependencies.instances.controller,
            engines=dependencies.engines,
            leaf=dependencies.settings.leaf,
            domain=dependencies.settings.scale_up_domain,
            cordoned=self._cordoned,
            holdings=holdings,
            counters=self._counters().snapshot(),
        )

    def handle(self, request: Request) -> AsyncGenerator[Reply, None]:
        """Return the replies to one request; `remote_error` returns what an exception is reported as."""
        if self._logs_context and isinstance(request, Work):
            name_in_logs(request)
        tracing = self._dependencies.tracing
        if tracing is None:
            return self._replies(request)
        if isinstance(request, StartInstance):
            tracing.starts.note_request(request)
        return tracing.call(request, self._replies) if isinstance(request, Work) else self._replies(request)

    def _replies(self, request: Request) -> AsyncGenerator[Reply, None]:
        dependencies, instances = self._dependencies, self._dependencies.instances
        clock, calls = dependencies.clock, dependencies.calls
        match request:
            case Generate(pipeline=name) if name:
                return generate_by(dependencies.pipelines.get(name), request, clock, calls)
            case Generate(instance_id=id_):
                return generate(instances.get(id_), request, clock, calls, dependencies.kv_connector)
            case Compute(instance_id=id_):
                return compute(instances.get(id_), request, clock, calls)
            case InvokeHandler(instance_id=id_):
                return invoke_handler(instances.get(id_), request, clock, calls)
            case ForwardRequest(instance_id=id_):
                return forward(instances.get(id_), request, clock, calls)
            case StartInstance():
                return self._start(request)
            case StopInstance():
                return self._stop(request)
            case WarmImage():
                return self._warm(request)
            case CheckModel():
                return self._check(request)
            case AddTokenizer():
                return self._add_tokenizer(request)
            case PullModel():
                return self._pull(request)
            case CloseFolders():
                return self._close_folders(request)
            case DropImage():
                return self._drop(request)
            case UnpinImage():
                return self._unkeep(request)
            case PrepareLinks():
                return self._prepare_links(request)
            case CordonNode():
                return self._cordon(request)
            case TailLogs():
                return self._tail(request)
            case GetStatus():
                return self._status(request.follow)
            case FollowArrivals(interval_ms=interval_ms):
                arriving = dependencies.loader.arriving
                return follow_arrivals(arriving, instances.live, clock, interval_ms / 1000)
            case EndCalls():
                return self._end_calls(request)
            case SettleCalls():
                return self._settle_calls(request)
            case OpenPipeline():
                return dependencies.pipelines.open(request)
            case HandOffCalls():
                return dependencies.pipelines.move_calls(request)
            case LeaveInstance(instance_id=id_):
                return leave_instance(instances.get(id_), request, dependencies.kv_connector)
            case PrefetchKv(instance_id=id_):
                return prefetch_kv(instances.get(id_), request, dependencies.kv_connector)
            case OpenStage():
                return dependencies.stages.open(request)
            case LinkStage():
                return dependencies.stages.link(request)

    async def _start(self, request: StartInstance) -> AsyncGenerator[Reply, None]:
        instance = self._dependencies.instances.start(request)
        reported, layers = None, LayerReports(self._dependencies.clock.monotonic_s)
        while instance.state in (InstanceState.STARTING, InstanceState.LOADING):
            held = b""
            if request.live and instance.spec is not None:
                held = encode_layer_set(layers(instance.loaded_layers, instance.spec.manifest.num_layers))
            life = instance.life
            now = InstanceProgress(stage=life.phase, fraction=life.record.progress, held=held)
            if now == reported:
                await instance.next_change()
            else:
                reported = now
                yield now
        record = instance.life.record
        if record.state is InstanceState.STOPPED and isinstance(instance.failure, PipelineLost):
            raise instance.failure
        if record.state is InstanceState.STOPPED:
            raise StartStopped(f"instance {instance.id} was stopped")
        if record.state is InstanceState.FAILED:
            failure = instance.failure
            if isinstance(failure, InvokerError | EngineError | HandlerError):
                raise RemoteError(failure.code, record.error) from failure
            raise StartFailed(record.error) from failure
        yield InstanceStarted(
            instance_id=instance.id, start_kind=record.start_kind, phases_ms=dict(record.phases_ms)
        )

    async def _stop(self, request: StopInstance) -> AsyncGenerator[Reply, None]:
        await self._dependencies.instances.stop(request.instance_id, request.grace_s)
        yield Acknowledged()

    async def _warm(self, request: WarmImage) -> AsyncGenerator[Reply, None]:
        if self._state is NodeState.DRAINING:
            raise NodeDraining(f"node {self._dependencies.settings.node_id} is draining")
        dependencies, image = self._dependencies, request.image
        manifest = await dependencies.loader.manifest(image)
        reports: asyncio.Queue[float | None] = asyncio.Queue()
        throttle = ProgressThrottle(reports.put_nowait, dependencies.clock.monotonic_s)
        async with dependencies.loader.open_image(
            image, manifest, throttle, yielding=request.preserve_pinned
        ) as arrival:
            complete = asyncio.ensure_future(arrival.complete())
            complete.add_done_callback(lambda _: reports.put_nowait(None))
            try:
                while (fraction := await reports.get()) is not None:
                    yield InstanceProgress(stage="fetch", fraction=fraction)
                await complete
            finally:
                complete.cancel()
            if request.pin:  # it is mapped here, so it cannot be evicted meanwhile
                await run_in_thread(dependencies.tier.keep, image.image)
                dependencies.changed()
        detail = f"image {image.image[:12]} from {arrival.source}"
        dependencies.rings.add(request.function, request.version, f"warmed {detail}")
        yield Acknowledged(detail=detail)

    async def _check(self, request: CheckModel) -> AsyncGenerator[Reply, None]:
        yield ModelChecked(natively=await self._dependencies.instances.check(request))

    async def _add_tokenizer(self, request: AddTokenizer) -> AsyncGenerator[Reply, None]:
        await self._dependencies.instances.add_tokenizer(request)
        yield Acknowledged()

    async def _prepare_links(self, request: PrepareLinks) -> AsyncGenerator[Reply, None]:
        peers = [PeerAddress(url=peer.cast, host=peer.host) for peer in request.peers]
        await self._dependencies.links.prepare(peers)
        yield Acknowledged()

    async def _cordon(self, request: CordonNode) -> AsyncGenerator[Reply, None]:
        self._cordoned = request.cordoned
        self._dependencies.changed()
        yield Acknowledged()

    async def _pull(self, request: PullModel) -> AsyncGenerator[Reply, None]:
        folders = self._dependencies.folders
        path = await run_in_thread(folders.open, request.name, request.image, request.files)
        yield ModelFolder(path=str(path))

    async def _close_folders(self, request: CloseFolders) -> AsyncGenerator[Reply, None]:
        await run_in_thread(self._dependencies.folders.close, request.image)
        yield Acknowledged()

    async def _drop(self, request: DropImage) -> AsyncGenerator[Reply, None]:
        dependencies = self._dependencies
        if request.tier == Tier.GPU:
            dropped = dependencies.device_cache.drop(request.image)
        elif request.tier == Tier.HOST:
            dependencies.published.release_mapping(request.image)
            dropped = await run_in_thread(dependencies.tier.evict, request.image)
        elif request.tier == Tier.DISK:
            disk = dependencies.disk
            dropped = disk is not None and await run_in_thread(disk.drop, request.image)
        else:
            raise RemoteError(
                "bad_request", f"images can be dropped from gpu, host or disk, not {request.tier!r}"
            )
        dependencies.changed()
        yield Acknowledged(detail="dropped" if dropped else "in use, or not cached")

    async def _unkeep(self, request: UnpinImage) -> AsyncGenerator[Reply, None]:
        await run_in_thread(self._dependencies.tier.unkeep, request.image)
        self._dependencies.changed()
        yield Acknowledged()

    async def _tail(self, request: TailLogs) -> AsyncGenerator[Reply, None]:
        wanted = (request.function, request.lines, request.since_version)
        if not request.follow:
            yield LogChunk(lines=self._dependencies.rings.tail(*wanted))
            return
        async for lines in self._dependencies.rings.follow(*wanted):
            yield LogChunk(lines=lines)

    async def _status(self, follow: bool) -> AsyncGenerator[Reply, None]:
        yield NodeStatus(record=self.record())
        if follow:
            async with aclosing(self._dependencies.loads.follow(self._dependencies.instances.live)) as feed:
                async for loads in feed:
                    yield NodeLoads(loads=loads)

    async def _end_calls(self, request: EndCalls) -> AsyncGenerator[Reply, None]:
        yield CallsUsed(gpu_us=await self._dependencies.calls.end(request.request_ids))

    async def _settle_calls(self, request: SettleCalls) -> AsyncGenerator[Reply, None]:
        self._dependencies.calls.settle(request.request_ids)
        yield Acknowledged()

    def _counters(self) -> Counters:
        dependencies = self._dependencies
        busy_us, loading_us, idle_us = dependencies.meter.totals()
        return replace(
            dependencies.counters,
            busy_us=busy_us,
            loading_us=loading_us,
            idle_us=idle_us,
            cast_sent_bytes=dependencies.cast_sent_bytes(),
            rdma_quarantined_bytes=dependencies.quarantined_bytes(),
            evictions=dependencies.device_cache.evictions + dependencies.tier.evictions,
        )

    def _holdings(self) -> tuple[CachedImage, ...]:
        """Return the complete images of this node, each with its tiers."""
        dependencies = self._dependencies
        on_device = {one.image: one for one in dependencies.device_cache.complete()}
        wall_s, now_s = dependencies.clock.wall_s(), dependencies.clock.monotonic_s()
        on_disk = {} if dependencies.disk is None else {one.digest: one for one in dependencies.disk.images()}
        writer = dependencies.disk_writer
        holdings = []
        for image in dependencies.tier.images():
            device_image, disk_image = on_device.pop(image.digest, None), on_disk.pop(image.digest, None)
            tiers = (
                *((Tier.GPU,) if device_image is not None else ()),
                Tier.HOST,
                *((Tier.DISK,) if disk_image is not None else ()),
            )
            holdings.append(
                CachedImage(
                    image=image.digest,
                    tiers=tiers,
                    bytes=image.nbytes,
                    last_used_at=image.last_used_at,
                    pinned=image.kept,
                    settled=image.verified and not (writer is not None and writer.is_pending(image.digest)),
                )
            )
        for device_image in on_device.values():
            used_at = wall_s - (now_s - device_image.last_used_s)
            nbytes = device_image.region.nbytes
            disk_image = on_disk.pop(device_image.image, None)
            tiers = (Tier.GPU,) if disk_image is None else (Tier.GPU, Tier.DISK)
            holdings.append(
                CachedImage(image=device_image.image, tiers=tiers, bytes=nbytes, last_used_at=used_at)
            )
        holdings += [
            CachedImage(image=one.digest, tiers=(Tier.DISK,), bytes=one.nbytes, last_used_at=one.last_used_at)
            for one in on_disk.values()
        ]
        return tuple(sorted(holdings, key=lambda holding: holding.image))


def remote_error(error: Exception) -> Exception:
    """Return the exception, with a code of `registry.messages`, that a failed request is reported as."""
    match error:
        case PipelineLost() | RemoteError():
            return error  # a lost pipeline's message starts with the lost node
        case InvokerError() | EngineError() | HandlerError():
            return RemoteError(error.code, str(error))
        case RegistryError() | CastError() | OSError():
            return RemoteError("start_failed", str(error) or type(error).__name__)
        case _:
            return error
