"""Pipelines that this node runs, because it has their model's LM head."""

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AsyncExitStack
from itertools import pairwise
from secrets import token_hex
from typing import Any

from invoker.base.errors import InvalidWork, NoSuchInstance, NoSuchPipeline, PipelineLost
from invoker.engine.decoder import limits_for
from invoker.engine.factory import max_sequences_for
from invoker.engine.kv.cache import PAGE_TOKENS
from invoker.engine.scheduling.pipeline_scheduler import PipelineScheduler, PipelineShape
from invoker.instances.instance import Instance
from invoker.links.link import StageKey
from invoker.links.listener import StageListener
from invoker.pipeline.driver import PipelineDriver
from invoker.pipeline.engines import StageContext, model_of, opened_stage
from invoker.pipeline.metered import MeteredStage
from invoker.pipeline.remote_stage import Connect, RemoteStage
from invoker.prefill.engines import layer_stage_factory
from invoker.prefill.layer_feed import follow_load
from invoker.prefill.layers import LoadedLayers
from invoker.prefill.source import PairDriver
from rdmacast.aio.groups import cancel_and_wait, run_all
from rdmacast.aio.shielded import shielded_stack
from registry.channel.server import caller
from registry.messages.live import (
    HandOffCalls,
    KvLocation,
    KvStage,
    OpenPipeline,
    PipelineOpened,
    pipeline_name,
)
from registry.messages.node import Acknowledged, Reply

RETIRE_TIMEOUT_S = 2.0  # for all stages to export K and V of moved requests
LINGER_S = 10.0  # for another gateway to adopt a pipeline of a lost one
_BLAME_TIMEOUT_S = 0.25  # for the failed node to be identified after its neighbours' failures

Driver = PipelineDriver | PairDriver

log = logging.getLogger("invoker.stages")


class HostedPipeline:
    """One pipeline: a task, attached to this node's instance."""

    def __init__(
        self,
        request: OpenPipeline,
        node: str,
        connect: Connect,
        listener: StageListener,
        context: StageContext,
    ) -> None:
        self.request = request
        self.name = pipeline_name(request.pipeline, request.epoch)
        self.opened: asyncio.Future[PipelineOpened] = asyncio.get_running_loop().create_future()
        self.driver: Driver | None = None
        self.openers = 0
        self._place = _own_place(request, node)
        self._own = request.stages[self._place]
        self.instance: Instance = context.instance(self._own.instance)
        self._listener = listener
        self._context = context
        self._remote_stages = [
            RemoteStage(stage, place, request, connect)
            for place, stage in enumerate(request.stages)
            if place != self._place
        ]
        self.kv_tokens = 0  # room for K and V in the smallest stage, once it is open
        self._reason: Exception | None = None
        self._is_reconfigured = False
        self.instance.attachments.add(self)
        self.task = asyncio.create_task(self._run(), name=f"pipeline {self.name}")
        self.task.add_done_callback(self._on_done)

    @property
    def running(self) -> Driver:
        """Return the driver. Raises NoSuchPipeline while the pipeline is not open."""
        if self.driver is None:
            raise NoSuchPipeline(f"pipeline {self.name} is not open yet")
        return self.driver

    def __repr__(self) -> str:
        return f"<HostedPipeline {self.name} {self._remote_stages!r} {self.driver!r}>"

    def kv_location(self, sequence: str) -> KvLocation:
        """Return where the stages have exported a sequence's K and V."""
        links = {self._place: (self._listener.url, self._listener.host)}
        for stage in self._remote_stages:
            if stage.opened is not None:
                links[stage.place] = stage.opened.link, stage.opened.host
        stages = [
            KvStage(link=links[place][0], host=links[place][1], first=one.first, last=one.last)
            for place, one in enumerate(self.request.stages)
        ]
        request = self.request
        return KvLocation(
            pipeline=request.pipeline, epoch=request.epoch, sequence=sequence, stages=tuple(stages)
        )

    def reconfigure(self) -> None:
        """Move all requests to the reconfigured pipeline, without exports.

        It recomputes K and V; exports would wait for all steps in flight.
        """
        self._is_reconfigured = True
        if isinstance(self.driver, PipelineDriver):
            self.driver.move(export_kv=False)
        elif self.driver is not None:
            self.driver.move()

    async def ended(self) -> Exception:
        """Wait until the pipeline has ended, and return the reason."""
        await asyncio.wait([self.task])
        fault = None if self.task.cancelled() else self.task.exception()
        if isinstance(fault, Exception):
            return fault
        return self._reason or NoSuchPipeline(f"pipeline {self.name} was closed")

    async def aclose(self) -> None:
        """End the pipeline with its instance."""
        self._reason = PipelineLost(f"{self._own.node}: instance {self.instance.id} has ended")
        await self.close()

    async def close(self) -> None:
        """Move all requests and end the pipeline. Idempotent."""
        await cancel_and_wait(self.task)

    async def _run(self) -> None:
        async with shielded_stack() as stack:
            before = stack.enter_context(self._listener.expect_link(self._key(self._place)))
            for stage in self._remote_stages:
                stack.push_async_callback(stage.aclose)
            opening = self._open_pair if self.request.layerwise else self._open_stages
            driver = self.driver = await opening(stack, before)
            stack.push_async_callback(self._close, driver)
            self.opened.set_result(PipelineOpened())
            log.info("pipeline %s of %d stages is open", self.name, len(self.request.stages))
            self._reason = await self._loss(driver)
            log.warning("pipeline %s is lost: %s", self.name, self._reason)
            raise self._reason

    async def _open_stages(
        self, stack: AsyncExitStack, before: "asyncio.Future[socket.socket]"
    ) -> PipelineDriver:
        opened: list[MeteredStage] = []

        async def open_own() -> None:
            place, exports = self._key(self._place), self._listener.exports
            first, last = self._own.first, self._own.last
            own = opened_stage(self.instance, first, last, self._context, place, exports)
            opened.append(await stack.enter_async_context(own))

        await run_all(open_own(), *(stage.open() for stage in self._remote_stages))
        stage = opened[0]
        if not stage.stage.has_head:
            raise InvalidWork(f"the LM head is not on node {self._own.node}")
        scheduler = self._scheduler(stage)
        behind = await self._connect_ring(stack)
        driver = PipelineDriver(stage, scheduler, await before, behind, name=f"pipeline {self.name}")
        stack.enter_context(self._listener.exports.on_request(self._key(self._place), driver.export_kv))
        return driver

    async def _open_pair(self, stack: AsyncExitStack, before: "asyncio.Future[socket.socket]") -> PairDriver:
        """Open a pair with the instance here as its source; a node that loads alone is its own target."""
        stages, is_alone = self.request.stages, not self._remote_stages
        if len(stages) > 2 or self._place != len(stages) - 1:
            raise InvalidWork("a pair is a loading node followed by a ready one")
        await self.instance.wait_for_layers(0, 1)
        spec, _, _ = model_of(self.instance)
        layers = spec.manifest.num_layers
        if (stages[0].first, stages[-1].last) != (0, layers):
            text = f"[{stages[0].first}, {stages[-1].last}) of {layers}"
            raise InvalidWork(f"layers {text} are not the whole model")
        if is_alone:
            return await self._open_alone(stack, spec.context_length)
        return await self._open_source(stack, spec.context_length, before)

    async def _open_alone(self, stack: AsyncExitStack, longest: int) -> PairDriver:
        """Return the driver of a pair of this node with itself."""
        factory = await stack.enter_async_context(layer_stage_factory(self.instance, self._context))
        own, first = LoadedLayers(factory.layers, factory.calls()), await factory.make(0)
        own.append(first)
        before, behind = socket.socketpair()  # unused: no other node
        name = f"pair {self.name}"
        driver = PairDriver(
            self.instance, before, behind, pages=first.pages, longest=longest, name=name, own=own
        )
        following = asyncio.create_task(follow_load(driver, self.instance, factory))
        stack.push_async_callback(cancel_and_wait, following)
        return driver

    async def _open_source(
        self, stack: AsyncExitStack, longest: int, before: "asyncio.Future[socket.socket]"
    ) -> PairDriver:
        """Return the driver of a pair with another node."""
        runner = self.instance.runner
        entries = None if runner is None else runner.entry_format
        if entries is None:
            raise InvalidWork(f"instance {self.instance.id} runs no prompts behind their first layers")
        (target,) = self._remote_stages
        await target.open()
        assert target.opened is not None
        pages, behind = target.opened.pages, await self._connect_ring(stack)
        name = f"pair {self.name}"
        return PairDriver(
            self.instance,
            await before,
            behind,
            pages=pages,
            longest=longest,
            name=name,
            entries=entries,
        )

    def _scheduler(self, stage: MeteredStage) -> PipelineScheduler:
        spec, device_image = self.instance.spec, self.instance.device_image
        if spec is None or device_image is None:
            raise NoSuchInstance(f"instance {self.instance.id} has ended")
        facts, stages = stage.stage.facts, len(self.request.stages)
        others = [one.opened.pages for one in self._remote_stages if one.opened is not None]
        pages = min([stage.stage.pages, *others])
        self.kv_tokens = pages * PAGE_TOKENS
        shape = PipelineShape(
            stages=stages,
            pages=pages,
            context=min(spec.context_length, facts.longest),
            vocabulary=facts.vocabulary,
            steps=stages + 1,
        )
        sequences = max_sequences_for(self.instance.request.max_concurrency)
        device = device_image.region.device.partition(":")[0]
        limits = limits_for(device, sequences=sequences, shared_prefill_tokens=facts.shared_prefill_tokens)
        # Unique names: exports of an earlier pipeline of this id must not match.
        return PipelineScheduler(shape, limits, names=f"{token_hex(4)}-")

    def _ring(self) -> list[RemoteStage]:
        """Return the other stages in the order of a step's way around the ring."""
        return self._remote_stages  # this node's stage is the first or the last

    async def _connect_ring(self, stack: AsyncExitStack) -> socket.socket:
        """Connect all stages in a ring; return the link to the first of the others."""
        ring = [stage.opened for stage in self._ring() if stage.opened is not None]
        behind = await self._link(ring[0].link, ring[0].host)
        stack.callback(behind.close)
        return behind

    async def _link(self, first_link: str, host: str) -> socket.socket:
        """Connect each stage to the next one and the last to this node; dial the first."""
        ring, listener = self._ring(), self._listener
        linked = [
            one.link(following.place, following.opened.link, following.opened.host)
            for one, following in pairwise(ring)
            if following.opened is not None
        ]
        linked.append(ring[-1].link(self._place, listener.url, listener.host))
        await run_all(*linked)
        return await listener.dial(first_link, host, self._key(ring[0].place))

    async def _loss(self, driver: Driver) -> PipelineLost:
        """Wait until a stage is lost, and return the reason with the failed node."""
        closed = asyncio.create_task(driver.wait_closed())
        watches = [stage.watch for stage in self._remote_stages if stage.watch is not None]
        try:
            await asyncio.wait([closed, *watches], return_when=asyncio.FIRST_COMPLETED)
            # Neighbours of a lost stage fail too, and may be reported first.
            loop = asyncio.get_running_loop()
            until_s = loop.time() + _BLAME_TIMEOUT_S
            while (left := [watch for watch in watches if not watch.done()]) and self._blamed() is None:
                _, pending = await asyncio.wait(
                    left, timeout=max(0.0, until_s - loop.time()), return_when=asyncio.FIRST_COMPLETED
                )
                if len(pending) == len(left):
                    break
        finally:
            closed.cancel()
        blamed = self._blamed() or next((one for one in self._remote_stages if one.lost is not None), None)
        if blamed is not None and blamed.lost is not None:
            return blamed.lost
        return PipelineLost(f"{self._own.node}: {driver.failure or 'the pipeline has ended'}")

    def _blamed(self) -> RemoteStage | None:
        return next((stage for stage in self._remote_stages if stage.is_cause), None)

    async def _close(self, driver: Driver) -> None:
        lost = self._reason
        if lost is not None:
            driver.fail(lost)  # first: `aclose` would move the requests
        try:
            if lost is None and not self._is_reconfigured and isinstance(driver, PipelineDriver):
                await driver.retire(RETIRE_TIMEOUT_S)
        finally:
            await driver.aclose()
        driver.fail(lost or NoSuchPipeline(f"pipeline {self.name} has ended"))

    def _key(self, place: int) -> StageKey:
        return StageKey(pipeline=self.request.pipeline, epoch=self.request.epoch, place=place)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self.instance.attachments.discard(self)
        if not task.cancelled():
            task.exception()  # retrieved: reported by `ended`
        self.opened.cancel()


class HostedPipelines:
    """The pipelines of this node. Belongs to the event loop's thread.

    `connected` returns whether a peer's channel is open.
    """

    def __init__(
        self,
        node: str,
        connect: Connect,
        listener: StageListener,
        context: StageContext,
        connected: Callable[[str], bool],
    ) -> None:
        self._node = node
        self._connect = connect
        self._listener = listener
        self._context = context
        self._connected = connected
        self._pipelines: dict[str, HostedPipeline] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<HostedPipelines {list(self._pipelines.values())!r}>"

    async def open(self, request: OpenPipeline) -> AsyncGenerator[Reply, None]:
        """Run a pipeline, or join an open one, until all its callers have left.

        If a caller's channel broke, the pipeline runs on for LINGER_S, so that a gateway can adopt it.
        Raises the reason of its end.
        """
        pipeline = self._pipelines.get(pipeline_name(request.pipeline, request.epoch))
        if pipeline is None:
            pipeline = await self._start(request)
        if pipeline.request != request:
            raise InvalidWork(f"pipeline {pipeline.name} is open with other stages")
        pipeline.openers += 1
        left = False
        try:
            waited: list[asyncio.Future[Any]] = [pipeline.opened, pipeline.task]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if pipeline.opened.done() and not pipeline.opened.cancelled():
                yield pipeline.opened.result()
            raise await pipeline.ended()
        except (asyncio.CancelledError, GeneratorExit):
            left = self._connected(caller.get())
            raise
        finally:
            pipeline.openers -= 1
            if not pipeline.openers:
                self._spawn(self._close_unused(pipeline, 0.0 if left or pipeline.task.done() else LINGER_S))

    def get(self, name: str) -> HostedPipeline:
        """Return a pipeline by its name. Raises NoSuchPipeline."""
        pipeline = self._pipelines.get(name)
        if pipeline is None:
            raise NoSuchPipeline(f"node {self._node} runs no pipeline {name}")
        return pipeline

    async def move_calls(self, request: HandOffCalls) -> AsyncGenerator[Reply, None]:
        """Move requests off a pipeline; without ids, all, because it will be reconfigured."""
        pipeline = self._pipelines.get(pipeline_name(request.pipeline, request.epoch))
        if pipeline is not None and not request.request_ids:
            pipeline.reconfigure()
        elif pipeline is not None and pipeline.driver is not None:
            pipeline.driver.move(request.request_ids)
        yield Acknowledged()

    async def aclose(self) -> None:
        """End all pipelines. Idempotent."""
        for pipeline in tuple(self._pipelines.values()):
            await pipeline.close()
        for task in tuple(self._closing):
            task.cancel()
        if self._closing:
            await asyncio.wait(self._closing)

    async def _start(self, request: OpenPipeline) -> HostedPipeline:
        for other in tuple(self._pipelines.values()):
            if other.request.pipeline == request.pipeline and other.request.epoch < request.epoch:
                await other.close()  # reconfigured
        if (found := self._pipelines.get(pipeline_name(request.pipeline, request.epoch))) is not None:
            return found  # started meanwhile
        pipeline = HostedPipeline(request, self._node, self._connect, self._listener, self._context)
        self._pipelines[pipeline.name] = pipeline
        pipeline.task.add_done_callback(lambda _: self._forget(pipeline))
        return pipeline

    def _forget(self, pipeline: HostedPipeline) -> None:
        if self._pipelines.get(pipeline.name) is pipeline:
            del self._pipelines[pipeline.name]

    async def _close_unused(self, pipeline: HostedPipeline, after_s: float) -> None:
        if after_s:
            await asyncio.wait([pipeline.task], timeout=after_s)
        if not pipeline.openers:
            await pipeline.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def _own_place(request: OpenPipeline, node: str) -> int:
    """Return the index of this node's stage, the first or the last. Raises InvalidWork."""
    stages = request.stages
    if any(one.last != following.first for one, following in pairwise(stages)):
        raise InvalidWork("the stages' layer ranges are not contiguous")
    for place in (len(stages) - 1, 0):
        if stages[place].node == node:
            return place
    raise InvalidWork(f"node {node} has neither the first stage nor the last")
