"""The open pipelines of a controller: one call to the head of each, which lasts as long as the pipeline."""

import asyncio
import logging
from collections.abc import Callable, Collection
from math import inf

from gateway.cluster.node_client import ChannelPool
from gateway.cluster.state_cache import ClusterStateCache, VersionKey
from gateway.live.publisher import LiveStatePublisher
from registry.errors import ChannelClosed, ChannelError, RemoteError
from registry.messages.live import HandOffCalls, OpenPipeline, PipelineOpened, StageSpec
from registry.records.live import LivePipeline

log = logging.getLogger(__name__)

_OPEN_TIMEOUT_S = 30.0  # until all stages answer
_HAND_OFF_TIMEOUT_S = 2.0  # until the head of an earlier epoch answers
_PipelineKey = tuple[VersionKey, str, int]  # a pipeline's version, id and epoch


class PipelineFailed(Exception):
    """The pipeline could not be opened or failed because of `node`."""

    def __init__(self, node: str, reason: str) -> None:
        super().__init__(reason)
        self.node = node


OnOpened = Callable[[VersionKey, LivePipeline], None]
OnLost = Callable[[VersionKey, LivePipeline, PipelineFailed], None]


class OpenPipelines:
    """The calls that keep pipelines open; `run` owns their tasks.

    `opened` is called for each pipeline that takes calls, which is published from then on; `lost` for each
    that could not be opened or failed.
    """

    def __init__(
        self,
        state_cache: ClusterStateCache,
        links: ChannelPool,
        publisher: LiveStatePublisher,
        opened: OnOpened,
        lost: OnLost,
    ) -> None:
        self._state_cache = state_cache
        self._links = links
        self._publisher = publisher
        self._on_opened = opened
        self._on_lost = lost
        self._open: dict[_PipelineKey, asyncio.Task[None]] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._is_over = False

    def __repr__(self) -> str:
        return f"<OpenPipelines {list(self._open)}>"

    async def run(self) -> None:
        """Keep pipelines open and published until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._tasks = group
            try:
                await self._publisher.run()
            finally:
                self._is_over = True

    def is_open(self, key: VersionKey, pipeline: LivePipeline) -> bool:
        """Return whether it is open or being opened."""
        return (key, pipeline.pipeline_id, pipeline.epoch) in self._open

    def open(self, key: VersionKey, pipeline: LivePipeline) -> None:
        """Open a pipeline, after its earlier epoch is closed."""
        if self._tasks is not None:
            entry = key, pipeline.pipeline_id, pipeline.epoch
            task = self._tasks.create_task(self._serve(key, pipeline), name=f"pipeline {pipeline.name}")
            self._open[entry] = task
            task.add_done_callback(lambda _: self._open.pop(entry, None))

    def close(self, key: VersionKey, pipeline_id: str, before: float = inf) -> None:
        """Close the epochs of a pipeline before the given one."""
        for (of, known_id, epoch), task in list(self._open.items()):
            if of == key and known_id == pipeline_id and epoch < before:
                task.cancel()

    def close_others(self, key: VersionKey, names: Collection[str]) -> None:
        """Close the pipelines of a version that are not in `names`."""
        for (of, pipeline_id, epoch), task in list(self._open.items()):
            if of == key and f"{pipeline_id}.{epoch}" not in names:
                task.cancel()

    async def _serve(self, key: VersionKey, pipeline: LivePipeline) -> None:
        """Open the pipeline and keep it open until cancelled or until it fails."""
        try:
            await self._hand_off_earlier(key, pipeline)
            await self._keep_open(key, pipeline)
        except PipelineFailed as failure:
            log.warning("%s: pipeline %s is lost: %s", key, pipeline.name, failure)
            self._open.pop((key, pipeline.pipeline_id, pipeline.epoch), None)
            known = self._publisher.pipeline(key, pipeline.pipeline_id)
            if known is not None and known.epoch == pipeline.epoch:
                self._publisher.remove_pipeline(key, pipeline.pipeline_id)
            self._on_lost(key, pipeline, failure)

    async def _keep_open(self, key: VersionKey, pipeline: LivePipeline) -> None:
        """Hold the call that keeps the pipeline open. Raises PipelineFailed."""
        head = pipeline.stages[pipeline.head].node
        client = self._links.client(head)
        if client is None:
            raise PipelineFailed(head, f"no channel to {head}")
        opened = client.call(self._request(pipeline))
        try:
            replies = await opened.__aenter__()
            try:
                async with asyncio.timeout(_OPEN_TIMEOUT_S):
                    reply = await anext(aiter(replies), None)
                if isinstance(reply, PipelineOpened):
                    self._opened(key, pipeline)
                    async for _ in replies:
                        pass
            finally:
                if not self._is_over:
                    await opened.__aexit__(None, None, None)
        except TimeoutError:
            raise PipelineFailed(head, f"its stages did not answer within {_OPEN_TIMEOUT_S:g} s") from None
        except RemoteError as error:
            raise PipelineFailed(_named(pipeline, error.message) or head, error.message) from error
        except (ChannelClosed, ChannelError) as error:
            raise PipelineFailed(head, str(error)) from error
        raise PipelineFailed(head, f"{head} closed it without an error")

    def _request(self, pipeline: LivePipeline) -> OpenPipeline:
        """Return the request that opens the pipeline. Raises PipelineFailed if a member is unknown."""
        stages = []
        for stage in pipeline.stages:
            entry = self._state_cache.node(stage.node)
            if entry is None:
                raise PipelineFailed(stage.node, f"{stage.node} is lost")
            stages.append(
                StageSpec(
                    node=stage.node,
                    address=entry.record.channel,
                    instance=stage.instance_id,
                    first=stage.first,
                    last=stage.last,
                )
            )
        return OpenPipeline(
            pipeline=pipeline.pipeline_id,
            epoch=pipeline.epoch,
            stages=tuple(stages),
            layerwise=pipeline.is_pair,
        )

    def _opened(self, key: VersionKey, pipeline: LivePipeline) -> None:
        log.info("%s: pipeline %s takes calls", key, pipeline.name)
        self._on_opened(key, pipeline)
        known = self._publisher.pipeline(key, pipeline.pipeline_id)
        if known is None or known.epoch < pipeline.epoch:  # else it was recovered
            self._publisher.put_pipeline(key, pipeline)

    async def _hand_off_earlier(self, key: VersionKey, pipeline: LivePipeline) -> None:
        """Hand the calls of an earlier epoch off before its stages close: members run one epoch at a time."""
        known = self._publisher.pipeline(key, pipeline.pipeline_id)
        if known is not None and known.epoch < pipeline.epoch:
            self._publisher.remove_pipeline(key, pipeline.pipeline_id)
            client = self._links.client(known.stages[known.head].node)
            request = HandOffCalls(pipeline=known.pipeline_id, epoch=known.epoch)
            try:
                if client is not None:
                    async with asyncio.timeout(_HAND_OFF_TIMEOUT_S), client.call(request) as replies:
                        async for _ in replies:
                            pass
            except (ChannelError, TimeoutError) as error:
                log.info("%s: calls of pipeline %s were not moved: %r", key, known.name, error)
        self.close(key, pipeline.pipeline_id, before=pipeline.epoch)


def _named(pipeline: LivePipeline, message: str) -> str:
    """Return the member that the message starts with, "" if none."""
    name = message.partition(": ")[0]
    return name if any(stage.node == name for stage in pipeline.stages) else ""
