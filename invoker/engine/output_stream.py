"""One `generate` call, between the engine's thread and the event loop."""

import asyncio

from invoker.engine.contract import NewSequence, TokenOutput


class OutputStream:
    """A sequence and its unread outputs, or the error that replaces them."""

    def __init__(self, sequence: NewSequence) -> None:
        self.sequence = sequence
        self.outputs: asyncio.Queue[TokenOutput | Exception] = asyncio.Queue()
        self.ended = False

    async def next(self) -> TokenOutput:
        """Return the next output, or raise a queued error; a `finish_reason` or `error` marks the last."""
        output = await self.outputs.get()
        if isinstance(output, Exception):
            self.ended = True
            raise output
        self.ended = bool(output.finish_reason or output.error)
        return output
