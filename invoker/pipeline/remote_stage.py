"""A stage of a pipeline on another node, controlled over the node's channel."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from invoker.base.errors import PipelineLost
from rdmacast.aio.groups import cancel_and_wait
from registry.channel.client import Channel
from registry.errors import ChannelClosed, ChannelError, RemoteError
from registry.messages.live import LinkStage, OpenPipeline, OpenStage, StageOpened, StageSpec
from registry.messages.node import Reply

# Opens a channel to a node. Raises ChannelError.
Connect = Callable[[str], Awaitable[Channel]]


class RemoteStage:
    """A stage on another node; `watch` ends when the stage does, and `lost` has the reason.

    `is_cause` is True if it ended by itself, not for the loss of a neighbour.
    """

    def __init__(self, stage: StageSpec, place: int, opening: OpenPipeline, connect: Connect) -> None:
        self.node = stage.node
        self.place = place
        self.opened: StageOpened | None = None
        self.is_cause = False
        self.lost: PipelineLost | None = None
        self.watch: asyncio.Task[None] | None = None
        self._stage = stage
        self._request = OpenStage(
            pipeline=opening.pipeline,
            epoch=opening.epoch,
            place=place,
            instance=stage.instance,
            first=stage.first,
            last=stage.last,
            layerwise=opening.layerwise,
        )
        self._connect = connect
        self._channel: Channel | None = None
        self._stack = AsyncExitStack()

    def __repr__(self) -> str:
        return f"<RemoteStage {self.node} [{self._stage.first}, {self._stage.last}) lost={self.lost}>"

    async def open(self) -> None:
        """Open the stage; return once it accepts steps. Raises PipelineLost."""
        try:
            channel = self._channel = await self._connect(self._stage.address)
            self._stack.push_async_callback(channel.aclose)
            replies = await self._stack.enter_async_context(channel.call(self._request))
            reply: Reply = await anext(replies)
        except (RemoteError, ChannelError, ChannelClosed, StopAsyncIteration) as error:
            raise self._fault(error) from error
        if not isinstance(reply, StageOpened):
            raise self._fault(ChannelError(f"a {type(reply).__name__} is not a reply to OpenStage"))
        self.opened = reply

        async def watch() -> None:
            try:
                async for _ in replies:
                    continue
                self._fault(ChannelError("the stage has ended"))
            except (RemoteError, ChannelError, ChannelClosed) as error:
                self._fault(error)

        self.watch = asyncio.create_task(watch(), name=f"stage on {self.node}")

    async def link(self, to: int, following: str, host: str) -> None:
        """Connect its output to the next stage. Raises PipelineLost."""
        assert self._channel is not None
        request = self._request
        link = LinkStage(
            pipeline=request.pipeline,
            epoch=request.epoch,
            place=request.place,
            to=to,
            following=following,
            host=host,
        )
        try:
            await self._channel.ask(link)
        except (RemoteError, ChannelError, ChannelClosed) as error:
            raise self._fault(error) from error

    async def aclose(self) -> None:
        """Close the stage. Idempotent."""
        if self.watch is not None:
            await cancel_and_wait(self.watch)
        await self._stack.aclose()

    def _fault(self, error: Exception) -> PipelineLost:
        self.is_cause = not (isinstance(error, RemoteError) and error.code == PipelineLost.code)
        text = error.message if isinstance(error, RemoteError) else str(error) or type(error).__name__
        self.lost = PipelineLost(f"{self.node}: {text}")
        return self.lost
