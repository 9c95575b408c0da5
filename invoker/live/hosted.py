"""The stages that this node runs for pipelines of other nodes."""

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Any

from invoker.errors import NoSuchInstance, NoSuchPipeline, PipelineLost
from invoker.instance import Instance
from invoker.stages.door import Door
from invoker.stages.engines import StageGear, opened_stage
from invoker.stages.frames import LinkLost
from invoker.stages.link import StageKey
from invoker.stages.worker import StageWorker
from invoker.stages.zigzag_engines import LayerMaker, layer_maker
from invoker.stages.zigzag_target import TargetWorker
from invoker.together import let_go_whole
from registry.live_messages import LinkStage, OpenStage, StageOpened
from registry.messages import Done, Reply

log = logging.getLogger("invoker.stages")


class HostedStage:
    """One stage, from when it is asked for until it is closed: a task of its own, a Part of its instance."""

    def __init__(self, request: OpenStage, instance: Instance, door: Door, made_with: StageGear) -> None:
        loop = asyncio.get_running_loop()
        self.request = request
        self.key = StageKey(pipeline=request.pipeline, epoch=request.epoch, place=request.place)
        self.opened: asyncio.Future[StageOpened] = loop.create_future()
        self._behind: asyncio.Future[socket.socket] = loop.create_future()
        self._instance = instance
        self._door = door
        self._made_with = made_with
        self._ended_by_instance = False
        instance.parts.add(self)
        self.task = asyncio.create_task(self._live(), name=str(self.key))
        self.task.add_done_callback(self._over)

    def __repr__(self) -> str:
        return f"<HostedStage {self.key} [{self.request.first}, {self.request.last}) {self._instance!r}>"

    def link(self, behind: socket.socket) -> bool:
        """Where its steps go on to, which belongs to the stage from now on; False if it has that already."""
        if self._behind.done():
            return False
        self._behind.set_result(behind)
        return True

    @property
    def is_linked(self) -> bool:
        return self._behind.done()

    async def ended(self) -> Exception:
        """Return once it has ended, with the reason."""
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
        """The instance ends."""
        self._ended_by_instance = True
        await self.close()

    async def close(self) -> None:
        """End it after the step under way. Idempotent."""
        self.task.cancel()
        await asyncio.wait([self.task])

    async def _live(self) -> None:
        request, door = self.request, self._door
        async with let_go_whole() as stack:
            before = stack.enter_context(door.awaiting(self.key))
            stack.callback(self._close_behind)
            if request.zigzag:
                await self._help(stack, before)
                return
            stage = await stack.enter_async_context(
                opened_stage(
                    self._instance, request.first, request.last, self._made_with, self.key, door.shelf
                )
            )
            self.opened.set_result(StageOpened(link=door.url, host=door.host, pages=stage.stage.pages))
            behind = await asyncio.shield(self._behind)
            worker = StageWorker(stage, await before, behind, name=f"stage {self.key.place}")
            stack.push_async_callback(worker.aclose)
            stack.enter_context(door.shelf.asking(self.key, worker.give))
            log.info("%s runs layers [%d, %d)", self.key, request.first, request.last)
            await worker.wait_closed()
            raise worker.failure or LinkLost("it has ended")

    async def _help(self, stack: AsyncExitStack, before: "asyncio.Future[socket.socket]") -> None:
        """As the target of a pair: begin with the first layer, and go on with each one that lands."""
        maker = await stack.enter_async_context(layer_maker(self._instance, self._made_with, waits=True))
        first = await maker.make(0)
        self.opened.set_result(StageOpened(link=self._door.url, host=self._door.host, pages=first.pages))
        behind = await asyncio.shield(self._behind)
        worker = TargetWorker(
            maker.layers, maker.calls(), await before, behind, name=f"stage {self.key.place}"
        )
        stack.push_async_callback(worker.aclose)
        worker.grow(first)
        growing = asyncio.create_task(_grow(worker, maker))
        stack.push_async_callback(_cancelled, growing)
        closed = asyncio.create_task(worker.wait_closed())
        stack.push_async_callback(_cancelled, closed)
        log.info("%s runs what there is of %d layers", self.key, maker.layers)
        await asyncio.wait([closed, growing], return_when=asyncio.FIRST_COMPLETED)
        if growing.done():
            growing.result()
        await closed
        raise worker.failure or LinkLost("it has ended")

    def _close_behind(self) -> None:
        if not self._behind.cancel() and not self._behind.cancelled():
            self._behind.result().close()

    def _over(self, task: asyncio.Task[None]) -> None:
        self._instance.parts.discard(self)
        if not task.cancelled():
            task.exception()  # whoever asks is told
        self.opened.cancel()


async def _grow(worker: TargetWorker, maker: LayerMaker) -> None:
    for layer in range(1, maker.layers - 1):  # the last one is the source's
        worker.grow(await maker.make(layer))


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


class HostedStages:
    """Belongs to the event loop's thread."""

    def __init__(self, door: Door, made_with: StageGear) -> None:
        self._door = door
        self._made_with = made_with
        self._stages: dict[StageKey, HostedStage] = {}

    def __repr__(self) -> str:
        return f"<HostedStages {list(self._stages.values())!r}>"

    async def open(self, request: OpenStage) -> AsyncGenerator[Reply, None]:
        """Run the stage until whoever asked leaves. Raises what ended it."""
        instance = self._made_with.instance(request.instance)
        key = StageKey(pipeline=request.pipeline, epoch=request.epoch, place=request.place)
        for other in [one for one in self._stages.values() if one.request.instance == request.instance]:
            if other.key.pipeline == key.pipeline and other.key.epoch < key.epoch:
                await other.close()  # it has been formed anew
        if key in self._stages:
            raise NoSuchPipeline(f"{key} is open already")
        hosted = self._stages[key] = HostedStage(request, instance, self._door, self._made_with)
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
        """Connect a stage with the one behind it. Raises NoSuchPipeline, LinkLost."""
        key = StageKey(pipeline=request.pipeline, epoch=request.epoch, place=request.place)
        hosted = self._stages.get(key)
        if hosted is None:
            raise NoSuchPipeline(f"{key} is not here")
        if not hosted.is_linked:
            to = StageKey(pipeline=request.pipeline, epoch=request.epoch, place=request.to)
            behind = await self._door.dial(request.following, request.host, to)
            if not hosted.link(behind):
                behind.close()
        yield Done()
