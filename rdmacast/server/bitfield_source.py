"""The bitfield that a served region reports to its watchers."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, runtime_checkable

from rdmacast.bitfield import Bitfield, block_count
from rdmacast.transport import RegionSource


@runtime_checkable
class BitfieldSource(Protocol):
    """A region with a bitfield of its blocks."""

    def bitfield(self, block_bytes: int) -> Bitfield:
        """Return the bitfield in blocks of that size. Raises ProtocolError if there are too many."""
        ...

    def watch(self, changed: Callable[[], None]) -> AbstractContextManager[None]:
        """Call `changed` on the event loop, inside, when the bitfield may have gained or lost blocks."""
        ...


class WholeSource:
    """A BitfieldSource for a region that can only be waited for: all its blocks are pending, then held."""

    def __init__(self, source: RegionSource) -> None:
        self._source = source
        self._state = "coming"

    def __repr__(self) -> str:
        return f"WholeSource({self._state}, {self._source!r})"

    def bitfield(self, block_bytes: int) -> Bitfield:
        blocks = block_count(self._source.nbytes, block_bytes)
        everything = (1 << blocks) - 1
        return Bitfield(
            blocks=blocks,
            epoch=0,
            held=everything if self._state == "here" else 0,
            pending=everything if self._state == "coming" else 0,
        )

    @contextmanager
    def watch(self, changed: Callable[[], None]) -> Iterator[None]:
        waiting = asyncio.ensure_future(self._source.wait_for(0, self._source.nbytes))

        def ended(future: "asyncio.Future[None]") -> None:
            if not future.cancelled():
                self._state = "here" if future.exception() is None else "gone"
                changed()

        waiting.add_done_callback(ended)
        try:
            yield
        finally:
            waiting.cancel()
