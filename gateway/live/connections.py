"""The pipelines that a controller keeps open: a call to the head of each, which lasts as long as it does."""

import asyncio
import logging
from collections.abc import Callable, Collection
from math import inf

from gateway.directory import Directory, VersionKey
from gateway.live_board import LiveBoard
from gateway.node_client import Links
from registry.errors import ChannelClosed, ChannelError, RemoteError
from registry.live import Live, LivePipeline
from registry.live_messages import LeaveCalls, OpenPipeline, PipelineOpened, StageOf

log = logging.getLogger(__name__)

_OPEN_S = 30.0  # until all stages answer
_LEAVE_S = 2.0  # until the head of an earlier epoch answers
_Place = tuple[VersionKey, str, int]  # a pipeline's version, id and epoch


class PipelineFailed(Exception):
    """The pipeline could not be opened, or ended by itself; `node` failed it."""

    def __init__(self, node: str, reason: str) -> None:
        super().__init__(reason)
        self.node = node


Opened = Callable[[VersionKey, LivePipeline], None]
Lost = Callable[[VersionKey, LivePipeline, PipelineFailed], None]


class OpenPipelines:
    """`run` owns the calls; `opened` hears of pipelines that take calls, which stand on the board from then
    on, `lost` of those that could not be opened or ended by themselves."""

    def __init__(
        self, directory: Directory, links: Links, board: LiveBoard, opened: Opened, lost: Lost
    ) -> None:
        self._directory = directory
        self._links = links
        self._board = board
        self._told_opened = opened
        self._lost = lost
        self._open: dict[_Place, asyncio.Task[None]] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._is_over = False

    def __repr__(self) -> str:
        return f"<OpenPipelines {list(self._open)}>"

    async def run(self) -> None:
        """Keep pipelines open and tell of them until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._tasks = group
            try:
                await self._board.run()
            finally:
                self._is_over = True

    def is_open(self, key: VersionKey, pipeline: LivePipeline) -> bool:
        """Whether it is, or is being opened."""
        return (key, pipeline.pipeline_id, pipeline.epoch) in self._open

    def hold(self, key: VersionKey, pipeline: LivePipeline) -> None:
        """Have an earlier epoch of it left, then it opened."""
        if self._tasks is not None:
            place = key, pipeline.pipeline_id, pipeline.epoch
            task = self._tasks.create_task(self._serve(key, pipeline), name=f"pipeline {pipeline.name}")
            self._open[place] = task
            task.add_done_callback(lambda _: self._open.pop(place, None))

    def leave(self, key: VersionKey, pipeline_id: str, before: float = inf) -> None:
        """End the calls that keep its epochs before that one open."""
        for (of, known_id, epoch), task in list(self._open.items()):
            if of == key and known_id == pipeline_id and epoch < before:
                task.cancel()

    def leave_others(self, key: VersionKey, told: Collection[str]) -> None:
        """Leave the version's pipelines whose names are not among those that are told of."""
        for (of, pipeline_id, epoch), task in list(self._open.items()):
            if of == key and f"{pipeline_id}.{epoch}" not in told:
                task.cancel()

    async def _serve(self, key: VersionKey, pipeline: LivePipeline) -> None:
        """Have the pipeline opened, and keep it so until cancelled, or until it ends by itself."""
        try:
            await self._leave_earlier(key, pipeline)
            await self._keep_open(key, pipeline)
        except PipelineFailed as failure:
            log.warning("%s: pipeline %s is lost: %s", key, pipeline.name, failure)
            self._open.pop((key, pipeline.pipeline_id, pipeline.epoch), None)
            known = self._board.pipeline(key, pipeline.pipeline_id)
            if known is not None and known.epoch == pipeline.epoch:
                self._board.drop(key, pipeline.pipeline_id)
            self._lost(key, pipeline, failure)

    async def _keep_open(self, key: VersionKey, pipeline: LivePipeline) -> None:
        """Raises PipelineFailed."""
        head = pipeline.stages[pipeline.head].node
        client = self._links.client(head)
        if client is None:
            raise PipelineFailed(head, f"no channel to {head}")
        opened = client.call(self._request(pipeline))
        try:
            replies = await opened.__aenter__()
            try:
                async with asyncio.timeout(_OPEN_S):
                    reply = await anext(aiter(replies), None)
                if isinstance(reply, PipelineOpened):
                    self._opened(key, pipeline)
                    async for _ in replies:
                        pass
            finally:
                if not self._is_over:
                    await opened.__aexit__(None, None, None)
        except TimeoutError:
            raise PipelineFailed(head, f"its stages did not answer within {_OPEN_S:g} s") from None
        except RemoteError as error:
            raise PipelineFailed(_named(pipeline, error.message) or head, error.message) from error
        except (ChannelClosed, ChannelError) as error:
            raise PipelineFailed(head, str(error)) from error
        raise PipelineFailed(head, f"{head} ended it without a word")

    def _request(self, pipeline: LivePipeline) -> OpenPipeline:
        """Raises PipelineFailed if a member is not known any more."""
        stages = []
        for stage in pipeline.stages:
            entry = self._directory.node(stage.node)
            if entry is None:
                raise PipelineFailed(stage.node, f"{stage.node} is gone")
            stages.append(
                StageOf(
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
            zigzag=pipeline.way is Live.ZIGZAG,
        )

    def _opened(self, key: VersionKey, pipeline: LivePipeline) -> None:
        log.info("%s: pipeline %s takes calls", key, pipeline.name)
        self._told_opened(key, pipeline)
        known = self._board.pipeline(key, pipeline.pipeline_id)
        if known is None or known.epoch < pipeline.epoch:  # else it was adopted
            self._board.put(key, pipeline)

    async def _leave_earlier(self, key: VersionKey, pipeline: LivePipeline) -> None:
        """Members run one epoch at a time: have the calls of an earlier one move before its stages go."""
        known = self._board.pipeline(key, pipeline.pipeline_id)
        if known is not None and known.epoch < pipeline.epoch:
            self._board.drop(key, pipeline.pipeline_id)
            client = self._links.client(known.stages[known.head].node)
            request = LeaveCalls(pipeline=known.pipeline_id, epoch=known.epoch)
            try:
                if client is not None:
                    async with asyncio.timeout(_LEAVE_S), client.call(request) as replies:
                        async for _ in replies:
                            pass
            except (ChannelError, TimeoutError) as error:
                log.info("%s: calls of pipeline %s were not moved: %r", key, known.name, error)
        self.leave(key, pipeline.pipeline_id, before=pipeline.epoch)


def _named(pipeline: LivePipeline, message: str) -> str:
    """The member that the message begins with, "" if none."""
    name = message.partition(": ")[0]
    return name if any(stage.node == name for stage in pipeline.stages) else ""
