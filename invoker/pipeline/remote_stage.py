"""A stage of a pipeline on another node, as the node with the head sees it."""

import asyncio
from contextlib import AsyncExitStack

from invoker.errors import PipelineLost
from registry.channel import Channel
from registry.errors import ChannelClosed, ChannelError, RemoteError
from registry.live_messages import LinkStage, OpenPipeline, OpenStage, StageOf, StageOpened
from registry.messages import Reply


class Member:
    """Opened by `open`; from then on `watch` ends when the stage does. `lost` says why, with the node's id.

    `is_cause` says that it ended by itself, not since it misses its neighbour.
    """

    def __init__(self, stage: StageOf, place: int, opening: OpenPipeline, secret: bytes) -> None:
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
            zigzag=opening.zigzag,
        )
        self._secret = secret
        self._channel: Channel | None = None
        self._stack = AsyncExitStack()

    def __repr__(self) -> str:
        return f"<Member {self.node} [{self._stage.first}, {self._stage.last}) lost={self.lost}>"

    async def open(self) -> None:
        """Return once the stage waits for steps. Raises PipelineLost."""
        try:
            channel = self._channel = await Channel.connect(self._stage.address, self._secret)
            self._stack.push_async_callback(channel.aclose)
            replies = await self._stack.enter_async_context(channel.call(self._request))
            reply: Reply = await anext(replies)
        except (RemoteError, ChannelError, ChannelClosed, StopAsyncIteration) as error:
            raise self._fault(error) from error
        if not isinstance(reply, StageOpened):
            raise self._fault(ChannelError(f"a {type(reply).__name__} is no answer"))
        self.opened = reply

        async def watch() -> None:
            try:
                async for _ in replies:
                    continue
                self._fault(ChannelError("it has ended"))
            except (RemoteError, ChannelError, ChannelClosed) as error:
                self._fault(error)

        self.watch = asyncio.create_task(watch(), name=f"stage on {self.node}")

    async def link(self, to: int, following: str, host: str) -> None:
        """Have its steps go on to that stage. Raises PipelineLost."""
        assert self._channel is not None
        asked = self._request
        link = LinkStage(
            pipeline=asked.pipeline,
            epoch=asked.epoch,
            place=asked.place,
            to=to,
            following=following,
            host=host,
        )
        try:
            await self._channel.ask(link)
        except (RemoteError, ChannelError, ChannelClosed) as error:
            raise self._fault(error) from error

    async def aclose(self) -> None:
        """Have it closed. Idempotent."""
        if self.watch is not None:
            self.watch.cancel()
            await asyncio.wait([self.watch])
        await self._stack.aclose()

    def _fault(self, error: Exception) -> PipelineLost:
        self.is_cause = not (isinstance(error, RemoteError) and error.code == PipelineLost.code)
        text = error.message if isinstance(error, RemoteError) else str(error) or type(error).__name__
        self.lost = PipelineLost(f"{self.node}: {text}")
        return self.lost
