"""Pipelines of fake nodes: the part of a FakeNode that serves while it loads.

A pipeline generates the tokens of a whole node, and each costs each member OUTPUT_US. A pipeline of a single
node waits until its instance is ready, and its calls continue there when the pipeline ends.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gateway.fakes.channel import Send
from registry.errors import RemoteError
from registry.messages.live import (
    MOVED,
    HandOffCalls,
    KvLocation,
    KvStage,
    OpenPipeline,
    PipelineOpened,
    StageSpec,
    encode_layer_set,
    pipeline_name,
)
from registry.messages.node import Generate, InstanceProgress, RequestUsage, Tokens

if TYPE_CHECKING:
    from gateway.fakes.node import FakeNode


class FakeLayers:
    """The layers that a live start reports; a test adds to them."""

    def __init__(self) -> None:
        self._held = 0
        self._more = asyncio.Event()

    def hold(self, layers: int) -> None:
        self._held |= layers
        self._more.set()

    async def report(self, send: Send) -> None:
        """Report changes until cancelled."""
        reported = 0
        while True:
            if self._held != reported:
                reported = self._held
                await send(InstanceProgress(stage="fetch", fraction=0.5, held=encode_layer_set(reported)))
            self._more.clear()
            await self._more.wait()


@dataclass(slots=True)
class _Pipeline:
    stages: tuple[StageSpec, ...]
    openers: int = 0
    lost: str = ""
    over: bool = False
    leaving: set[str] = field(default_factory=set)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def notify(self) -> None:
        self.news.set()
        self.news = asyncio.Event()


def kv_at(stages: tuple[StageSpec, ...], work: Generate) -> KvLocation:
    """Return the location of a call's KV cache in a fake pipeline."""
    name, _, epoch = work.pipeline.rpartition(".")
    held = [KvStage(link=one.address, host=one.node, first=one.first, last=one.last) for one in stages]
    return KvLocation(pipeline=name, epoch=int(epoch), sequence=work.request_id, stages=tuple(held))


class FakePipelines:
    """Those that have their head on one node."""

    def __init__(
        self,
        node: "FakeNode",
        members: Callable[[], "Mapping[str, FakeNode]"],
        next_token: Callable[[tuple[int, ...]], int],
    ) -> None:
        self._node = node
        self._members = members
        self._next_token = next_token
        self._open: dict[str, _Pipeline] = {}
        self.opened: list[OpenPipeline] = []
        self.left: list[HandOffCalls] = []

    @property
    def names(self) -> list[str]:
        return list(self._open)

    async def until_left(self, openers: int) -> None:
        """Return once pipelines have at most `openers` in all."""
        while sum(pipeline.openers for pipeline in self._open.values()) > openers:
            await next(iter(self._open.values())).news.wait()

    async def hold_open(self, request: OpenPipeline, send: Send) -> None:
        name = pipeline_name(request.pipeline, request.epoch)
        for stage in request.stages:
            member = self._members().get(stage.node)
            if member is None or not member.alive or not member.runs(stage.instance):
                raise RemoteError("pipeline_lost", f"{stage.node}: does not answer")
        self.opened.append(request)
        pipeline = self._open.setdefault(name, _Pipeline(request.stages))
        pipeline.openers += 1
        try:
            await send(PipelineOpened())
            while not pipeline.lost:
                await pipeline.news.wait()
            raise RemoteError("pipeline_lost", pipeline.lost)
        finally:
            pipeline.openers -= 1
            if not pipeline.openers:
                self._open.pop(name, None)
                pipeline.over = True
            pipeline.notify()

    def leave(self, request: HandOffCalls) -> None:
        self.left.append(request)
        pipeline = self._open.get(pipeline_name(request.pipeline, request.epoch))
        if pipeline is not None:
            pipeline.leaving |= set(request.request_ids)
            pipeline.over = pipeline.over or not request.request_ids
            pipeline.notify()

    def lose(self, node: str) -> None:
        """Fail the pipelines of a member that died."""
        for pipeline in list(self._open.values()):
            if any(stage.node == node for stage in pipeline.stages):
                pipeline.lost = f"{node}: its link broke"
                pipeline.notify()

    async def serve(self, work: Generate, send: Send) -> None:
        pipeline = self._open.get(work.pipeline)
        if pipeline is None or pipeline.over:
            raise RemoteError("no_such_pipeline", work.pipeline)
        context, made = work.prompt_ids + work.generated_ids, len(work.generated_ids)
        last_us = 0
        while made < work.sampling.max_tokens:
            if not await self._next_step(pipeline, work.request_id):
                for stage in pipeline.stages:  # a step under way, which the last stage has not seen yet
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
            RequestUsage(
                prompt_tokens=len(work.prompt_ids),
                completion_tokens=made - len(work.generated_ids),
                gpu_us=last_us,
                exec_us=last_us,
            )
        )

    async def _next_step(self, pipeline: _Pipeline, call_id: str) -> bool:
        """Wait until the next token may be generated; return False if the call is to move."""
        step = asyncio.ensure_future(self._through(pipeline.stages))
        try:
            while True:
                if pipeline.lost:
                    raise RemoteError("pipeline_lost", pipeline.lost)
                if (pipeline.over or call_id in pipeline.leaving) and not self._is_whole(pipeline.stages):
                    return False
                if step.done():
                    step.result()
                    return True
                news = asyncio.ensure_future(pipeline.news.wait())
                try:
                    await asyncio.wait({step, news}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    news.cancel()
        finally:
            step.cancel()

    async def _through(self, stages: tuple[StageSpec, ...]) -> None:
        if len(stages) == 1:
            await self._node.until_settled(stages[0].instance)
            if not self._is_whole(stages):
                raise RemoteError("pipeline_lost", f"{self._node.id}: its instance has ended")
        await self._node.token.through()

    def _is_whole(self, stages: tuple[StageSpec, ...]) -> bool:
        return len(stages) == 1 and self._node.is_ready(stages[0].instance)
