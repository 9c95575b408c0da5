"""The node: what one invoker holds, and how it answers the gateways' requests."""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, replace

from invoker.arena import Arena
from invoker.calls import Calls, keep_metering
from invoker.counters import Counters
from invoker.device import DeviceFacts
from invoker.engine.contract import EngineError
from invoker.errors import Draining, InvokerError, PipelineLost, StartFailed, StartStopped
from invoker.handlers.errors import HandlerError
from invoker.host_tier import HostTier
from invoker.instances import Instances
from invoker.loader import ImageLoader, ProgressThrottle
from invoker.log_rings import LogRings
from invoker.meter import GpuMeter
from invoker.published import PublishedImages
from invoker.residents import Residents
from invoker.serving import compute, generate, generate_by, invoke_handler
from invoker.settings import Settings
from invoker.stages.heads import Pipelines
from invoker.stages.hosted import HostedStages
from invoker.stages.kv_moves import KvMoves
from invoker.threads import in_thread
from rdmacast.errors import CastError
from registry.clock import Clock
from registry.errors import RegistryError, RemoteError
from registry.instance import InstanceState
from registry.live_messages import LeaveCalls, LinkStage, OpenPipeline, OpenStage, held_as_bytes
from registry.messages import (
    CallsUsed,
    Compute,
    Done,
    DropImage,
    EndCalls,
    Generate,
    GetStatus,
    InstanceProgress,
    InstanceStarted,
    InvokeHandler,
    LogLines,
    NodeStatus,
    Reply,
    Request,
    SettleCalls,
    StartInstance,
    StopInstance,
    TailLogs,
    UnkeepImage,
    WarmImage,
)
from registry.node import Holding, NodeRecord, NodeState, Tier

log = logging.getLogger("invoker.node")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a node is made of; `invoker/assembly.py` puts it together."""

    settings: Settings
    facts: DeviceFacts
    clock: Clock
    arena: Arena
    tier: HostTier
    residents: Residents
    published: PublishedImages
    loader: ImageLoader
    instances: Instances
    stages: HostedStages
    pipelines: Pipelines
    kv_moves: KvMoves
    meter: GpuMeter
    calls: Calls
    rings: LogRings
    counters: Counters
    cast_sent_bytes: Callable[[], int]
    changed: Callable[[], None]


class Node:
    """Answers requests. Belongs to the event loop's thread; its parts are closed by who made them."""

    def __init__(self, parts: Parts, epoch: int) -> None:
        self._parts = parts
        self._epoch = epoch
        self._started_at = parts.clock.wall_s()
        self._state = NodeState.READY
        self._channel_url = ""
        self._cast_url = ""

    def __repr__(self) -> str:
        return f"<Node {self._parts.settings.node_id} {self._state} {self._parts.instances!r}>"

    def listening(self, channel_url: str, cast_url: str) -> None:
        """Where this node's servers are."""
        self._channel_url, self._cast_url = channel_url, cast_url

    async def keep_metering(self) -> None:
        """Have time written down as it goes by; never returns."""
        parts = self._parts
        await keep_metering(parts.meter, parts.calls, parts.settings.meter_interval_s)

    def longest_step_us(self) -> int:
        """How long the longest of its engines' steps under way has been running."""
        return self._parts.meter.longest_step_us()

    async def drain(self) -> None:
        """Take nothing new, and finish what is under way within the grace period."""
        self._state = NodeState.DRAINING
        self._parts.changed()
        await self._parts.instances.drain(self._parts.settings.grace_s)
        await self._parts.calls.close()

    def record(self) -> NodeRecord:
        """The node's record as of now; whatever it lists is served to other nodes too."""
        parts = self._parts
        holdings = self._holdings()
        parts.published.publish_all({holding.image: holding.bytes for holding in holdings})
        return NodeRecord(
            id=parts.settings.node_id,
            host=parts.settings.host_id,
            pid=os.getpid(),
            epoch=self._epoch,
            state=self._state,
            device=parts.facts.device,
            gpu_type=parts.facts.gpu_type,
            gpu_count=1,
            channel=self._channel_url,
            cast=self._cast_url,
            gpu_bytes=parts.arena.capacity_bytes,
            gpu_free_bytes=parts.arena.free_bytes,
            host_bytes=parts.tier.limit_bytes,
            host_free_bytes=max(0, parts.tier.limit_bytes - parts.tier.used_bytes()),
            reads_store=parts.loader.reads_store,
            allows_handlers=parts.settings.allow_handlers,
            link_rate_bytes_s=parts.settings.link_rate_bytes_s,
            started_at=self._started_at,
            holdings=holdings,
            counters=self._counters().snapshot(),
        )

    async def handle(self, request: Request) -> AsyncIterator[Reply]:
        """The replies to one request, in order. Raises RemoteError with a code of registry/messages.py."""
        try:
            async for reply in self._answer(request):
                yield reply
        except PipelineLost:
            raise  # its text begins with the node that is lost
        except (InvokerError, EngineError, HandlerError) as error:
            raise RemoteError(error.code, str(error)) from error
        except RemoteError:
            raise
        except (RegistryError, CastError, OSError) as error:
            raise RemoteError("start_failed", str(error) or type(error).__name__) from error

    def _answer(self, request: Request) -> AsyncGenerator[Reply, None]:
        parts = self._parts
        match request:
            case Generate(pipeline=name) if name:
                return generate_by(parts.pipelines.get(name), request, parts.clock, parts.calls)
            case Generate():
                instance = parts.instances.get(request.instance_id)
                return generate(instance, request, parts.clock, parts.calls, parts.kv_moves)
            case Compute():
                instance = parts.instances.get(request.instance_id)
                return compute(instance, request, parts.clock, parts.calls)
            case InvokeHandler():
                instance = parts.instances.get(request.instance_id)
                return invoke_handler(instance, request, parts.clock, parts.calls)
            case StartInstance():
                return self._start(request)
            case StopInstance():
                return self._stop(request)
            case WarmImage():
                return self._warm(request)
            case DropImage():
                return self._drop(request)
            case UnkeepImage():
                return self._unkeep(request)
            case TailLogs():
                return self._tail(request)
            case GetStatus():
                return self._status()
            case EndCalls():
                return self._end_calls(request)
            case SettleCalls():
                return self._settle_calls(request)
            case OpenPipeline():
                return parts.pipelines.open(request)
            case LeaveCalls():
                return parts.pipelines.leave(request)
            case OpenStage():
                return parts.stages.open(request)
            case LinkStage():
                return parts.stages.link(request)

    async def _start(self, request: StartInstance) -> AsyncGenerator[Reply, None]:
        instance = self._parts.instances.start(request)
        told = None
        while instance.state in (InstanceState.STARTING, InstanceState.LOADING):
            held = held_as_bytes(instance.held) if request.live else b""
            now = InstanceProgress(stage=instance.life.phase, fraction=instance.life.progress, held=held)
            if now == told:
                await instance.next_change()
            else:
                told = now
                yield now
        life = instance.life
        if life.state is InstanceState.STOPPED:
            raise StartStopped(f"instance {instance.id} was stopped")
        if life.state is InstanceState.FAILED:
            failure = instance.failure
            if isinstance(failure, InvokerError | EngineError | HandlerError):
                raise RemoteError(failure.code, life.error) from failure
            raise StartFailed(life.error) from failure
        yield InstanceStarted(
            instance_id=instance.id, start_kind=life.start_kind, phases_ms=dict(life.phases_ms)
        )

    async def _stop(self, request: StopInstance) -> AsyncGenerator[Reply, None]:
        await self._parts.instances.stop(request.instance_id, request.grace_s)
        yield Done()

    async def _warm(self, request: WarmImage) -> AsyncGenerator[Reply, None]:
        if self._state is NodeState.DRAINING:
            raise Draining(f"node {self._parts.settings.node_id} is leaving")
        parts, image = self._parts, request.image
        manifest = await parts.loader.manifest(image)
        reports: asyncio.Queue[float | None] = asyncio.Queue()
        throttle = ProgressThrottle(reports.put_nowait, parts.clock.monotonic_s)
        async with parts.loader.arriving(image, manifest, throttle, yielding=request.yielding) as arrival:
            complete = asyncio.ensure_future(arrival.complete())
            complete.add_done_callback(lambda _: reports.put_nowait(None))
            try:
                while (fraction := await reports.get()) is not None:
                    yield InstanceProgress(stage="fetch", fraction=fraction)
                await complete
            finally:
                complete.cancel()
            if request.keep:  # while it is mapped here nobody evicts it
                await in_thread(parts.tier.keep, image.image)
                parts.changed()
        detail = f"image {image.image[:12]} from {arrival.source}"
        parts.rings.add(request.function, f"warmed {detail}")
        yield Done(detail=detail)

    async def _drop(self, request: DropImage) -> AsyncGenerator[Reply, None]:
        parts = self._parts
        if request.tier == Tier.GPU:
            dropped = parts.residents.drop(request.image)
        elif request.tier == Tier.HOST:
            parts.published.idle(request.image)
            dropped = await in_thread(parts.tier.evict, request.image)
        else:
            raise RemoteError("bad_request", f"images are dropped from gpu or host, not {request.tier!r}")
        parts.changed()
        yield Done(detail="dropped" if dropped else "in use, or not here")

    async def _unkeep(self, request: UnkeepImage) -> AsyncGenerator[Reply, None]:
        await in_thread(self._parts.tier.unkeep, request.image)
        self._parts.changed()
        yield Done()

    async def _tail(self, request: TailLogs) -> AsyncGenerator[Reply, None]:
        if not request.follow:
            yield LogLines(lines=self._parts.rings.tail(request.function, request.lines))
            return
        async for lines in self._parts.rings.follow(request.function, request.lines):
            yield LogLines(lines=lines)

    async def _status(self) -> AsyncGenerator[Reply, None]:
        yield NodeStatus(record=self.record())

    async def _end_calls(self, request: EndCalls) -> AsyncGenerator[Reply, None]:
        yield CallsUsed(gpu_us=await self._parts.calls.end(request.request_ids))

    async def _settle_calls(self, request: SettleCalls) -> AsyncGenerator[Reply, None]:
        self._parts.calls.settle(request.request_ids)
        yield Done()

    def _counters(self) -> Counters:
        parts = self._parts
        busy_us, loading_us, idle_us = parts.meter.totals()
        return replace(
            parts.counters,
            busy_us=busy_us,
            loading_us=loading_us,
            idle_us=idle_us,
            cast_sent_bytes=parts.cast_sent_bytes(),
            evictions=parts.residents.evictions + parts.tier.evictions,
        )

    def _holdings(self) -> tuple[Holding, ...]:
        """All complete images of this node, each with all its tiers."""
        parts = self._parts
        on_device = {one.image: one for one in parts.residents.complete()}
        wall_s, now_s = parts.clock.wall_s(), parts.clock.monotonic_s()
        holdings = []
        for image in parts.tier.images():
            resident = on_device.pop(image.digest, None)
            used_at = image.last_used_at
            tiers: tuple[Tier, ...] = (Tier.HOST,)
            if resident is not None:
                used_at = max(used_at, wall_s - (now_s - resident.last_used_s))
                tiers = (Tier.GPU, Tier.HOST)
            holdings.append(
                Holding(
                    image=image.digest,
                    tiers=tiers,
                    bytes=image.nbytes,
                    last_used_at=used_at,
                    kept=image.kept,
                )
            )
        for resident in on_device.values():
            used_at = wall_s - (now_s - resident.last_used_s)
            nbytes = resident.region.nbytes
            holdings.append(
                Holding(image=resident.image, tiers=(Tier.GPU,), bytes=nbytes, last_used_at=used_at)
            )
        return tuple(sorted(holdings, key=lambda holding: holding.image))
