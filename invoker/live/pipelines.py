"""The pipelines that this node runs, since it has the head of their model."""

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AsyncExitStack
from itertools import pairwise
from secrets import token_hex
from typing import Any

from invoker.engine.conductor import Conductor, PipelineShape
from invoker.engine.decoder import limits_for
from invoker.engine.kv_cache import PAGE_TOKENS
from invoker.engines import MIN_SEQUENCES
from invoker.errors import BadWork, NoSuchInstance, NoSuchPipeline, PipelineLost
from invoker.instance import Instance
from invoker.stages.door import Door
from invoker.stages.driver import PipelineDriver
from invoker.stages.engines import StageGear, opened_stage
from invoker.stages.link import StageKey
from invoker.stages.lone import LoneDriver
from invoker.stages.member import Member
from invoker.stages.metered import MeteredStage
from invoker.stages.zigzag_engines import layer_maker
from invoker.stages.zigzag_layers import LayerChain
from invoker.stages.zigzag_source import PairDriver
from invoker.together import let_go_whole, together
from registry.channel_server import caller
from registry.live_messages import (
    KvAt,
    KvStage,
    LeaveCalls,
    OpenPipeline,
    PipelineOpened,
    name_of_pipeline,
)
from registry.messages import Done, Reply

RETIRE_S = 2.0  # for all stages to put aside what calls that move leave there
LINGER_S = 10.0  # for another gateway to take over from one that is gone
_TELL_S = 0.25  # in which the node that is to blame shows, where its neighbours show first

Driver = PipelineDriver | PairDriver | LoneDriver

log = logging.getLogger("invoker.stages")


class Pipeline:
    """One pipeline: a task of its own, a Part of this node's instance."""

    def __init__(
        self, request: OpenPipeline, node: str, secret: bytes, door: Door, made_with: StageGear
    ) -> None:
        self.request = request
        self.name = name_of_pipeline(request.pipeline, request.epoch)
        self.opened: asyncio.Future[PipelineOpened] = asyncio.get_running_loop().create_future()
        self.driver: Driver | None = None
        self.openers = 0
        self._place = _place_of(request, node)
        self._own = request.stages[self._place]
        self.instance: Instance = made_with.instance(self._own.instance)
        self._door = door
        self._made_with = made_with
        self._members = [
            Member(stage, place, request, secret)
            for place, stage in enumerate(request.stages)
            if place != self._place
        ]
        self._reason: Exception | None = None
        self._is_formed_anew = False
        self.instance.parts.add(self)
        self.task = asyncio.create_task(self._live(), name=f"pipeline {self.name}")
        self.task.add_done_callback(self._over)

    @property
    def running(self) -> Driver:
        """Raises NoSuchPipeline while it is not open."""
        if self.driver is None:
            raise NoSuchPipeline(f"pipeline {self.name} is not open yet")
        return self.driver

    def __repr__(self) -> str:
        return f"<Pipeline {self.name} {self._members!r} {self.driver!r}>"

    def kv_at(self, sequence: str) -> KvAt:
        """Where the stages have K and V of a sequence that they put aside."""
        links = {self._place: (self._door.url, self._door.host)}
        for member in self._members:
            if member.opened is not None:
                links[member.place] = member.opened.link, member.opened.host
        stages = [
            KvStage(link=links[place][0], host=links[place][1], first=one.first, last=one.last)
            for place, one in enumerate(self.request.stages)
        ]
        asked = self.request
        return KvAt(pipeline=asked.pipeline, epoch=asked.epoch, sequence=sequence, stages=tuple(stages))

    def give_way(self) -> None:
        """Its calls move to what is formed of it. That computes their K and V anew, so none are put aside: it
        would wait for all steps under way."""
        self._is_formed_anew = True
        if isinstance(self.driver, PipelineDriver):
            self.driver.leave(keeping=False)
        elif self.driver is not None:
            self.driver.leave()

    async def ended(self) -> Exception:
        """Return once it has ended, with the reason."""
        await asyncio.wait([self.task])
        fault = None if self.task.cancelled() else self.task.exception()
        if isinstance(fault, Exception):
            return fault
        return self._reason or NoSuchPipeline(f"pipeline {self.name} was closed")

    async def aclose(self) -> None:
        """The instance ends."""
        self._reason = PipelineLost(f"{self._own.node}: instance {self.instance.id} has ended")
        await self.close()

    async def close(self) -> None:
        """Move its calls and end it. Idempotent."""
        self.task.cancel()
        await asyncio.wait([self.task])

    async def _live(self) -> None:
        async with let_go_whole() as stack:
            before = stack.enter_context(self._door.awaiting(self._key(self._place)))
            for member in self._members:
                stack.push_async_callback(member.aclose)
            driver, opened = await self._open(stack, before)
            stack.push_async_callback(self._close, driver)
            self.driver = driver
            self.opened.set_result(opened)
            log.info("pipeline %s of %d stages is open", self.name, len(self.request.stages))
            self._reason = await self._loss(driver)
            log.warning("pipeline %s is lost: %s", self.name, self._reason)
            raise self._reason

    async def _open(
        self, stack: AsyncExitStack, before: "asyncio.Future[socket.socket]"
    ) -> tuple[Driver, PipelineOpened]:
        if self.request.zigzag:
            return await self._open_pair(stack, before)
        return await (self._open_stages(stack, before) if self._members else self._open_lone(stack))

    async def _open_lone(self, stack: AsyncExitStack) -> tuple[LoneDriver, PipelineOpened]:
        """The instance here answers once it is ready, and runs prompts by layers until then."""
        await self.instance.holds(0, 1)
        maker = await stack.enter_async_context(layer_maker(self.instance, self._made_with, waits=True))
        if (self._own.first, self._own.last) != (0, maker.layers):
            raise BadWork(f"layers [{self._own.first}, {self._own.last}) of {maker.layers} are no pipeline")
        first = await maker.make(0)
        driver = LoneDriver(self.instance, maker, first, name=f"pipeline {self.name}")
        context = 0 if self.instance.spec is None else self.instance.spec.context_length
        return driver, PipelineOpened(context_length=context, cached_tokens=first.pages * PAGE_TOKENS)

    async def _open_stages(
        self, stack: AsyncExitStack, before: "asyncio.Future[socket.socket]"
    ) -> tuple[PipelineDriver, PipelineOpened]:
        opened: list[MeteredStage] = []

        async def open_own() -> None:
            place, shelf = self._key(self._place), self._door.shelf
            first, last = self._own.first, self._own.last
            own = opened_stage(self.instance, first, last, self._made_with, place, shelf)
            opened.append(await stack.enter_async_context(own))

        await together(open_own(), *(member.open() for member in self._members))
        stage = opened[0]
        if not stage.stage.has_head:
            raise BadWork(f"the head of the model is not on {self._own.node}")
        conductor = self._conductor(stage)
        behind = await self._linked(stack)
        driver = PipelineDriver(stage, conductor, await before, behind, name=f"pipeline {self.name}")
        stack.enter_context(self._door.shelf.asking(self._key(self._place), driver.give))
        cached = conductor.shape.pages * PAGE_TOKENS
        return driver, PipelineOpened(context_length=conductor.max_sequence_tokens, cached_tokens=cached)

    async def _open_pair(
        self, stack: AsyncExitStack, before: "asyncio.Future[socket.socket]"
    ) -> tuple[PairDriver, PipelineOpened]:
        """The instance here is the source: its own engine answers, and the other stage helps."""
        if len(self.request.stages) != 2 or self._place == 0:
            raise BadWork("a pair is a node that loads, and then one that is ready")
        maker = await stack.enter_async_context(layer_maker(self.instance, self._made_with, waits=False))
        chain = LayerChain()

        async def open_own() -> None:
            for layer in range(maker.layers):
                chain.append(await maker.make(layer))

        (target,) = self._members
        await together(open_own(), target.open())
        assert target.opened is not None
        pages, behind = target.opened.pages, await self._linked(stack)
        driver = PairDriver(
            self.instance,
            chain,
            maker.calls(),
            await before,
            behind,
            target_pages=pages,
            name=f"pair {self.name}",
        )
        context = 0 if self.instance.spec is None else self.instance.spec.context_length
        return driver, PipelineOpened(context_length=context, cached_tokens=pages * PAGE_TOKENS)

    def _conductor(self, stage: MeteredStage) -> Conductor:
        spec, resident = self.instance.spec, self.instance.resident
        if spec is None or resident is None:
            raise NoSuchInstance(f"instance {self.instance.id} has ended")
        facts, stages = stage.stage.facts, len(self.request.stages)
        pages = [stage.stage.pages, *(one.opened.pages for one in self._members if one.opened is not None)]
        shape = PipelineShape(
            stages=stages,
            pages=min(pages),
            context=min(spec.context_length, facts.longest),
            vocabulary=facts.vocabulary,
            steps=stages + 1,
        )
        sequences = max(MIN_SEQUENCES, 2 * self.instance.request.max_concurrency)
        device = resident.region.device.partition(":")[0]
        limits = limits_for(device, sequences=sequences, turn_tokens=facts.turn_tokens)
        # What stages put aside while it was open before must not be taken for what they have now.
        return Conductor(shape, limits, names=f"{token_hex(4)}-")

    def _ring(self) -> list[Member]:
        """The other stages as steps pass them on their way from here to here."""
        return self._members  # the head is the first or the last of all

    async def _linked(self, stack: AsyncExitStack) -> socket.socket:
        """Connect all stages in a ring; the link to the first of the others."""
        ring = [member.opened for member in self._ring() if member.opened is not None]
        behind = await self._link(ring[0].link, ring[0].host)
        stack.callback(behind.close)
        return behind

    async def _link(self, first_link: str, host: str) -> socket.socket:
        """Connect each stage with the next one, and the last of the others with this one."""
        ring, door = self._ring(), self._door
        linked = [
            one.link(following.place, following.opened.link, following.opened.host)
            for one, following in pairwise(ring)
            if following.opened is not None
        ]
        linked.append(ring[-1].link(self._place, door.url, door.host))
        await together(*linked)
        return await door.dial(first_link, host, self._key(ring[0].place))

    async def _loss(self, driver: Driver) -> PipelineLost:
        """Return once a stage is gone, with the node that is to blame."""
        closed = asyncio.create_task(driver.wait_closed())
        watches = [member.watch for member in self._members if member.watch is not None]
        try:
            await asyncio.wait([closed, *watches], return_when=asyncio.FIRST_COMPLETED)
            # Neighbours of a stage that is gone end too, and may be heard of first.
            loop = asyncio.get_running_loop()
            until_s = loop.time() + _TELL_S
            while (left := [watch for watch in watches if not watch.done()]) and self._blamed() is None:
                _, pending = await asyncio.wait(
                    left, timeout=max(0.0, until_s - loop.time()), return_when=asyncio.FIRST_COMPLETED
                )
                if len(pending) == len(left):
                    break
        finally:
            closed.cancel()
        blamed = self._blamed() or next((one for one in self._members if one.lost is not None), None)
        if blamed is not None and blamed.lost is not None:
            return blamed.lost
        return PipelineLost(f"{self._own.node}: {driver.failure or 'the pipeline has ended'}")

    def _blamed(self) -> Member | None:
        return next((member for member in self._members if member.is_cause), None)

    async def _close(self, driver: Driver) -> None:
        lost = self._reason
        if lost is not None:
            driver.end(lost)  # before they would be moved as of a pipeline that was closed
        try:
            if lost is None and not self._is_formed_anew and isinstance(driver, PipelineDriver):
                await driver.retire(RETIRE_S)
        finally:
            await driver.aclose()
        driver.end(lost or NoSuchPipeline(f"pipeline {self.name} has ended"))

    def _key(self, place: int) -> StageKey:
        return StageKey(pipeline=self.request.pipeline, epoch=self.request.epoch, place=place)

    def _over(self, task: asyncio.Task[None]) -> None:
        self.instance.parts.discard(self)
        if not task.cancelled():
            task.exception()  # whoever asks is told
        self.opened.cancel()


class Pipelines:
    """Belongs to the event loop's thread. `connected` says whether a peer's channel is there still."""

    def __init__(
        self,
        node: str,
        secret: bytes,
        door: Door,
        made_with: StageGear,
        connected: Callable[[str], bool],
        *,
        linger_s: float = LINGER_S,
    ) -> None:
        self._node = node
        self._secret = secret
        self._door = door
        self._made_with = made_with
        self._connected = connected
        self._linger_s = linger_s
        self._pipelines: dict[str, Pipeline] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<Pipelines {list(self._pipelines.values())!r}>"

    async def open(self, request: OpenPipeline) -> AsyncGenerator[Reply, None]:
        """Run the pipeline, or join it if it is open, until all that asked for it have left. Where one's
        channel broke it goes on for a while, so that another can take it over. Raises what ended it."""
        pipeline = self._pipelines.get(name_of_pipeline(request.pipeline, request.epoch))
        if pipeline is None:
            pipeline = await self._begin(request)
        if pipeline.request != request:
            raise BadWork(f"pipeline {pipeline.name} has other stages")
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
                self._own(self._leave(pipeline, 0.0 if left or pipeline.task.done() else self._linger_s))

    def get(self, name: str) -> Pipeline:
        """Raises NoSuchPipeline."""
        pipeline = self._pipelines.get(name)
        if pipeline is None:
            raise NoSuchPipeline(f"node {self._node} runs no pipeline {name}")
        return pipeline

    async def leave(self, request: LeaveCalls) -> AsyncGenerator[Reply, None]:
        """Move calls; one that is not there any more has none. All are asked for before it is formed anew."""
        pipeline = self._pipelines.get(name_of_pipeline(request.pipeline, request.epoch))
        if pipeline is not None and not request.request_ids:
            pipeline.give_way()
        elif pipeline is not None and pipeline.driver is not None:
            pipeline.driver.leave(request.request_ids)
        yield Done()

    async def aclose(self) -> None:
        """End all. Idempotent."""
        for pipeline in tuple(self._pipelines.values()):
            await pipeline.close()
        for task in tuple(self._closing):
            task.cancel()
        if self._closing:
            await asyncio.wait(self._closing)

    async def _begin(self, request: OpenPipeline) -> Pipeline:
        for other in tuple(self._pipelines.values()):
            if other.request.pipeline == request.pipeline and other.request.epoch < request.epoch:
                await other.close()  # it is formed anew
        if (found := self._pipelines.get(name_of_pipeline(request.pipeline, request.epoch))) is not None:
            return found  # somebody else was faster
        pipeline = Pipeline(request, self._node, self._secret, self._door, self._made_with)
        self._pipelines[pipeline.name] = pipeline
        pipeline.task.add_done_callback(lambda _: self._forget(pipeline))
        return pipeline

    def _forget(self, pipeline: Pipeline) -> None:
        if self._pipelines.get(pipeline.name) is pipeline:
            del self._pipelines[pipeline.name]

    async def _leave(self, pipeline: Pipeline, after_s: float) -> None:
        if after_s:
            await asyncio.wait([pipeline.task], timeout=after_s)
        if not pipeline.openers:
            await pipeline.close()

    def _own(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def _place_of(request: OpenPipeline, node: str) -> int:
    """This node's place, the first or the last. Raises BadWork."""
    stages = request.stages
    if any(one.last != following.first for one, following in pairwise(stages)):
        raise BadWork("the stages do not meet")
    for place in (len(stages) - 1, 0):
        if stages[place].node == node:
            return place
    raise BadWork(f"node {node} has neither the first stage nor the last")
