"""Group instances: a model on several nodes, served by the pipeline of them all for as long as each lives."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from invoker.base.errors import InvalidWork
from invoker.engine.contract import EngineCall, NewSequence, TokenOutput
from invoker.engine.kv.entry import LayerEntry
from invoker.engine.kv.slices import KvSlice
from invoker.instances.instance import Instance
from invoker.links.listener import StageListener
from invoker.live.pipelines import HostedPipeline
from invoker.pipeline.engines import StageContext
from invoker.pipeline.remote_stage import Connect
from registry.messages.live import OpenPipeline, StageSpec
from registry.messages.node import StartInstance

log = logging.getLogger("invoker.groups")


class GroupRunner:
    """The pipeline of a group as a ModelRunner: the engine of the leader. It ends with the first lost member.

    Sequences begin with their prompt, whatever K and V are offered: each stage has those of its own layers.
    """

    kv_shape = None
    entry_format = None
    load = None

    def __init__(self, pipeline: HostedPipeline) -> None:
        self._pipeline = pipeline
        self._driver = pipeline.running

    def __repr__(self) -> str:
        return f"<GroupRunner {self._pipeline!r}>"

    @property
    def kv_tokens(self) -> tuple[int, int]:
        """The tokens in the KV cache, which are not counted, and its size: that of the smallest stage."""
        return 0, self._pipeline.kv_tokens

    @property
    def failure(self) -> Exception | None:
        task = self._pipeline.task
        fault = task.exception() if task.done() and not task.cancelled() else None
        return fault if isinstance(fault, Exception) else None

    async def generate(
        self,
        sequence: NewSequence,
        call: EngineCall,
        kv: Sequence[KvSlice] = (),
        *,
        entry: LayerEntry | None = None,
    ) -> AsyncGenerator[TokenOutput, None]:
        """Run a sequence; the stages meter it by the request's id. Raises PipelineLost."""
        async with aclosing(self._driver.generate(sequence, call)) as outputs:
            async for output in outputs:
                yield output

    async def wait_closed(self) -> None:
        """Return once the pipeline has ended."""
        await asyncio.wait([self._pipeline.task])

    async def aclose(self) -> None:
        """End the pipeline: the other members' stages end, too. Idempotent."""
        await self._pipeline.close()


async def open_group(
    instance: Instance, node: str, connect: Connect, listener: StageListener, context: StageContext
) -> GroupRunner:
    """Open the pipeline of the group that the instance leads; wait until all members have their layers.

    Raises PipelineLost, which names the member, or what its own stage failed with.
    """
    pipeline = HostedPipeline(_request(instance.request), node, connect, listener, context)
    waited: list[asyncio.Future[Any]] = [pipeline.opened, pipeline.task]
    try:
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if pipeline.task.done():
            raise await pipeline.ended()
        return GroupRunner(pipeline)
    except BaseException:
        await pipeline.close()
        raise


def _request(start: StartInstance) -> OpenPipeline:
    """Return the request that would open the pipeline. Raises InvalidWork."""
    group = start.group
    if group is None or len(start.channels) != len(group.members):
        raise InvalidWork(f"instance {start.instance_id} leads no group, or its channels are missing")
    stages = tuple(
        StageSpec(
            node=member.node,
            address=channel,
            instance=member.instance_id,
            first=member.first,
            last=member.last,
        )
        for member, channel in zip(group.members, start.channels, strict=True)
    )
    return OpenPipeline(pipeline=start.instance_id, epoch=0, stages=stages)
