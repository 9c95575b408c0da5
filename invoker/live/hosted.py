"""Stages that this node runs for pipelines of other nodes."""

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Any

from invoker.base.errors import NoSuchInstance, NoSuchPipeline, PipelineLost
from invoker.instances.instance import Instance
from invoker.links.framing import LinkLost
from invoker.links.link import StageKey
from invoker.links.listener import StageListener
from invoker.pipeline.engines import StageContext, opened_stage
from invoker.pipeline.worker import StageWorker
from invoker.prefill.engines import layer_stage_factory
from invoker.prefill.layer_feed import add_layers
from invoker.prefill.target import TargetWorker
from rdmacast.aio.groups import cancel_and_wait
from rdmacast.aio.shielded import shielded_stack
from registry.messages.live import LinkStage, OpenStage, StageOpened
from registry.messages.node import Acknowledged, Reply

log = logging.getLogger("invoker.stages")


class HostedStage:
    """One stage from its request to its end: a task, attached to its instance."""

    def __init__(
        self, request: OpenStage, instance: Instance, listener: StageListener, context: StageContext
    ) -> None:
        loop = asyncio.get_running_loop()
        self.request = request
        self.key = StageKey(pipeline=request.pipeline, epoch=request.epoch, place=request.place)
        self.opened: asyncio.Future[StageOpened] = loop.create_future()
        self._behind: asyncio.Future[socket.socket] = loop.create_future()
        self._instance = instance
        self._listener = listener
        self._context = context
        self._ended_by_instance = False
        instance.attachments.add(self)
        self.task = asyncio.create_task(self._run(), name=str(self.key))
        self.task.add_done_callback(self._on_done)

    def __repr__(self) -> str:
        return f"<HostedStage {self.key} [{self.request.first}, {self.request.last}) {self._instance!r}>"

    def link(self, behind: socket.socket) -> bool:
        """Connect the stage to the next one; it owns the socket. Return False if it is connected already."""
        if self._behind.done():
            return False
        self._behind.set_result(behind)
        return True

    @property
    def is_linked(self) -> bool:
        return self._behind.done()

    async def ended(self) -> Exception:
        """Wait until the stage has ended, and return the reason."""
        await asyncio.wait([self.task])
        if self.task.cancelled():
            return (
                NoSuchInstance(f"instance {self._instance.id} has ended")
                if self._ended_by_instance
                else (NoSuchPipeline(f"{self.key} was closed"))
            )
        fault = self.task.exception()
        if isinstance(fault, Exception):
            return fault
        return PipelineLost(f"{self.key} has ended")

    async def aclose(self) -> None:
        """End the stage with its instance."""
        self._ended_by_instance = True
        await self.close()

    async def close(self) -> None:
        """End the stage after the current step. Idempotent."""
        await cancel_and_wait(self.task)

    async def _run(self) -> None:
        request, listener = self.request, self._listener
        async with shielded_stack() as stack:
            before = stack.enter_context(listener.expect_link(self.key))
            stack.callback(self._close_behind)
            if request.layerwise:
                await self._run_as_target(stack, before)
                return
            stage = await stack.enter_async_context(
                opened_stage(
                    self._instance, request.first, request.last, self._context, self.key, listener.exports
                )
            )
            self.opened.set_result(
                StageOpened(link=listener.url, host=listener.host, pages=stage.stage.pages)
            )
            behind = await asyncio.shield(self._behind)
            worker = StageWorker(stage, await before, behind, name=f"stage {self.key.place}")
            stack.push_async_callback(worker.aclose)
            stack.enter_context(listener.exports.on_request(self.key, worker.export_kv))
            log.info("%s runs layers [%d, %d)", self.key, request.first, request.last)
            await worker.wait_closed()
            raise worker.failure or LinkLost("the worker has ended")

    async def _run_as_target(self, stack: AsyncExitStack, before: "asyncio.Future[socket.socket]") -> None:
        """Run as the target of a pair: start with the first layer and add each one that lands."""
        factory = await stack.enter_async_context(layer_stage_factory(self._instance, self._context))
        first = await factory.make(0)
        self.opened.set_result(
            StageOpened(link=self._listener.url, host=self._listener.host, pages=first.pages)
        )
        behind = await asyncio.shield(self._behind)
        worker = TargetWorker(
            factory.layers, factory.calls(), await before, behind, name=f"stage {self.key.place}"
        )
        stack.push_async_callback(worker.aclose)
        worker.add_layer(first)
        # The last layer runs on the source.
        adding = asyncio.create_task(add_layers(worker.add_layer, factory, 1, factory.layers - 1))
        stack.push_async_callback(cancel_and_wait, adding)
        closed = asyncio.create_task(worker.wait_closed())
        stack.push_async_callback(cancel_and_wait, closed)
        log.info("%s runs the loaded layers of %d", self.key, factory.layers)
        await asyncio.wait([closed, adding], return_when=asyncio.FIRST_COMPLETED)
        if adding.done():
            adding.result()
        await closed
        raise worker.failure or LinkLost("the worker has ended")

    def _close_behind(self) -> None:
        if not self._behind.cancel() and not self._behind.cancelled():
            self._behind.result().close()

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._instance.attachments.discard(self)
        if not task.cancelled():
            task.exception()  # retrieved: reported by `ended`
        self.opened.cancel()


class HostedStages:
    """The stages of this node. Belongs to the event loop's thread."""

    def __init__(self, listener: StageListener, context: StageContext) -> None:
        self._listener = listener
        self._context = context
        self._stages: dict[StageKey, HostedStage] = {}

    def __repr__(self) -> str:
        return f"<HostedStages {list(self._stages.values())!r}>"

    async def open(self, request: OpenStage) -> AsyncGenerator[Reply, None]:
        """Run a stage until the caller leaves. Raises the reason of its end."""
        instance = self._context.instance(request.instance)
        key = StageKey(pipeline=request.pipeline, epoch=request.epoch, place=request.place)
        for other in [one for one in self._stages.values() if one.request.instance == request.instance]:
            if other.key.pipeline == key.pipeline and other.key.epoch < key.epoch:
                await other.close()  # the pipeline has been reconfigured
        if key in self._stages:
            raise NoSuchPipeline(f"{key} is open already")
        hosted = self._stages[key] = HostedStage(request, instance, self._listener, self._context)
        try:
            waited: list[asyncio.Future[Any]] = [hosted.opened, hosted.task]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if hosted.opened.done() and not hosted.opened.cancelled():
                yield hosted.opened.result()
            raise await hosted.ended()
        finally:
            try:
                await hosted.close()
            finally:
                del self._stages[key]

    async def link(self, request: LinkStage) -> AsyncGenerator[Reply, None]:
        """Connect a stage to the next one. Raises NoSuchPipeline, LinkLost."""
        key = StageKey(pipeline=request.pipeline, epoch=request.epoch, place=request.place)
        hosted = self._stages.get(key)
        if hosted is None:
            raise NoSuchPipeline(f"{key} is not on this node")
        if not hosted.is_linked:
            to = StageKey(pipeline=request.pipeline, epoch=request.epoch, place=request.to)
            behind = await self._listener.dial(request.following, request.host, to)
            if not hosted.link(behind):
                behind.close()
        yield Acknowledged()
