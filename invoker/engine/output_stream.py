"""One `generate` call, between the thread that runs it and the loop that reads it."""

import asyncio

from invoker.engine.contract import NewSequence, TokenOutput


class OutputStream:
    """A sequence, and its outputs that the loop has not read yet, or the error that comes in their place."""

    def __init__(self, sequence: NewSequence) -> None:
        self.sequence = sequence
        self.outputs: asyncio.Queue[TokenOutput | Exception] = asyncio.Queue()
        self.ended = False

    async def next(self) -> TokenOutput:
        """The next output; with a `finish_reason` or an `error` it is the last. Raises an error that came."""
        output = await self.outputs.get()
        if isinstance(output, Exception):
            self.ended = True
            raise output
        self.ended = bool(output.finish_reason or output.error)
        return output
