"""What a served region tells of its blocks to those that watch it."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, runtime_checkable

from rdmacast.have_map import HaveMap, blocks_of
from rdmacast.transport import RegionSource


@runtime_checkable
class HaveSource(Protocol):
    """A region that knows which of its blocks are here."""

    def have_map(self, block_bytes: int) -> HaveMap:
        """In blocks of that size. Raises ProtocolError if these would be too many."""
        ...

    def watch(self, changed: Callable[[], None]) -> AbstractContextManager[None]:
        """Inside, `changed` is called, on the event loop, when the map may tell more or expect less."""
        ...


class WholeSource:
    """A HaveSource for a region that can only be waited for: it is coming, then it is there."""

    def __init__(self, source: RegionSource) -> None:
        self._source = source
        self._state = "coming"

    def __repr__(self) -> str:
        return f"WholeSource({self._state}, {self._source!r})"

    def have_map(self, block_bytes: int) -> HaveMap:
        blocks = blocks_of(self._source.nbytes, block_bytes)
        everything = (1 << blocks) - 1
        return HaveMap(
            blocks=blocks,
            epoch=0,
            held=everything if self._state == "here" else 0,
            coming=everything if self._state == "coming" else 0,
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
