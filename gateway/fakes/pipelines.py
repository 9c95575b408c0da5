"""Pipelines of fake nodes: the part of a FakeNode that serves while it loads.

A token of a pipeline is the one that a whole node would make, and costs each member OUTPUT_US. What is asked
of a single node waits until its instance is ready, and goes on there though the pipeline ends.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from gateway.fake_channel import Gate, Send
from registry.errors import RemoteError
from registry.live_messages import (
    MOVED,
    KvAt,
    KvStage,
    LeaveCalls,
    OpenPipeline,
    PipelineOpened,
    StageOf,
    held_as_bytes,
    name_of_pipeline,
)
from registry.messages import Generate, InstanceProgress, Tokens, Usage


class FakeMember(Protocol):
    """What a fake pipeline needs of its members. `use` counts a token of the call and says what it used."""

    id: str
    alive: bool
    token: Gate
    pipelines: "FakePipelines"

    def runs(self, instance_id: str) -> bool: ...

    def is_ready(self, instance_id: str) -> bool: ...

    async def until_settled(self, instance_id: str) -> None: ...

    def use(self, call_id: str) -> int: ...


class FakeLayers:
    """The layers that a live start tells; a test adds to them."""

    def __init__(self) -> None:
        self._held = 0
        self._more = asyncio.Event()

    def hold(self, layers: int) -> None:
        self._held |= layers
        self._more.set()

    async def tell(self, send: Send) -> None:
        """Tell of them until cancelled."""
        told = 0
        while True:
            if self._held != told:
                told = self._held
                await send(InstanceProgress(stage="fetch", fraction=0.5, held=held_as_bytes(told)))
            self._more.clear()
            await self._more.wait()


@dataclass(slots=True)
class _Pipeline:
    stages: tuple[StageOf, ...]
    openers: int = 0
    lost: str = ""
    over: bool = False
    leaving: set[str] = field(default_factory=set)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self) -> None:
        self.news.set()
        self.news = asyncio.Event()


def kv_at(stages: tuple[StageOf, ...], work: Generate) -> KvAt:
    """Where a fake pipeline says that a call's K and V lie."""
    name, _, epoch = work.pipeline.rpartition(".")
    held = [KvStage(link=one.address, host=one.node, first=one.first, last=one.last) for one in stages]
    return KvAt(pipeline=name, epoch=int(epoch), sequence=work.request_id, stages=tuple(held))


class FakePipelines:
    """Those that have their head on one node."""

    def __init__(
        self,
        node: FakeMember,
        members: Callable[[], Mapping[str, FakeMember]],
        next_token: Callable[[tuple[int, ...]], int],
    ) -> None:
        self._node = node
        self._members = members
        self._next_token = next_token
        self._open: dict[str, _Pipeline] = {}
        self.opened: list[OpenPipeline] = []
        self.left: list[LeaveCalls] = []

    def __repr__(self) -> str:
        return f"<FakePipelines {self._open}>"

    @property
    def names(self) -> list[str]:
        return list(self._open)

    async def until_left(self, openers: int) -> None:
        """Return once at most so many hold a pipeline open."""
        while sum(pipeline.openers for pipeline in self._open.values()) > openers:
            await next(iter(self._open.values())).news.wait()

    async def hold_open(self, request: OpenPipeline, send: Send) -> None:
        name = name_of_pipeline(request.pipeline, request.epoch)
        for stage in request.stages:
            member = self._members().get(stage.node)
            if member is None or not member.alive or not member.runs(stage.instance):
                raise RemoteError("pipeline_lost", f"{stage.node}: does not answer")
        self.opened.append(request)
        pipeline = self._open.setdefault(name, _Pipeline(request.stages))
        pipeline.openers += 1
        try:
            await send(PipelineOpened(context_length=1024, cached_tokens=4096))
            while not pipeline.lost:
                await pipeline.news.wait()
            raise RemoteError("pipeline_lost", pipeline.lost)
        finally:
            pipeline.openers -= 1
            if not pipeline.openers:
                self._open.pop(name, None)
                pipeline.over = True
            pipeline.tell()

    def leave(self, request: LeaveCalls) -> None:
        self.left.append(request)
        pipeline = self._open.get(name_of_pipeline(request.pipeline, request.epoch))
        if pipeline is not None:
            pipeline.leaving |= set(request.request_ids)
            pipeline.over = pipeline.over or not request.request_ids
            pipeline.tell()

    def lose(self, node: str) -> None:
        """A member is gone."""
        for pipeline in list(self._open.values()):
            if any(stage.node == node for stage in pipeline.stages):
                pipeline.lost = f"{node}: its link broke"
                pipeline.tell()

    async def serve(self, work: Generate, send: Send) -> None:
        pipeline = self._open.get(work.pipeline)
        if pipeline is None or pipeline.over:
            raise RemoteError("no_such_pipeline", work.pipeline)
        context, made = work.prompt_ids + work.generated_ids, len(work.generated_ids)
        last_us = 0
        while made < work.sampling.max_tokens:
            if not await self._turn(pipeline, work.request_id):
                for stage in pipeline.stages:  # a step on its way, of which the head does not know yet
                    self._members()[stage.node].use(work.request_id)
                left = Tokens(ids=(), finish_reason=MOVED, gpu_us=last_us, kv=kv_at(pipeline.stages, work))
                await send(left)
                break
            context += (self._next_token(context),)
            made += 1
            for stage in pipeline.stages:
                used_us = self._members()[stage.node].use(work.request_id)
                last_us = used_us if stage.node == self._node.id else last_us
            reason = "length" if made == work.sampling.max_tokens else ""
            await send(Tokens(ids=context[-1:], finish_reason=reason, gpu_us=last_us))
        await send(
            Usage(
                prompt_tokens=len(work.prompt_ids),
                completion_tokens=made - len(work.generated_ids),
                gpu_us=last_us,
                queue_us=0,
                exec_us=last_us,
            )
        )

    async def _turn(self, pipeline: _Pipeline, call_id: str) -> bool:
        """Wait for the next token's turn; False if the call is to go on elsewhere."""
        turn = asyncio.ensure_future(self._through(pipeline.stages))
        try:
            while True:
                if pipeline.lost:
                    raise RemoteError("pipeline_lost", pipeline.lost)
                if (pipeline.over or call_id in pipeline.leaving) and not self._is_whole(pipeline.stages):
                    return False
                if turn.done():
                    turn.result()
                    return True
                news = asyncio.ensure_future(pipeline.news.wait())
                try:
                    await asyncio.wait({turn, news}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    news.cancel()
        finally:
            turn.cancel()

    async def _through(self, stages: tuple[StageOf, ...]) -> None:
        if len(stages) == 1:
            await self._node.until_settled(stages[0].instance)
            if not self._is_whole(stages):
                raise RemoteError("pipeline_lost", f"{self._node.id}: its instance has ended")
        await self._node.token.through()

    def _is_whole(self, stages: tuple[StageOf, ...]) -> bool:
        return len(stages) == 1 and self._node.is_ready(stages[0].instance)
