"""Watches a peer's bitfields of regions, on a connection of their own that no payload delays."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from rdmacast.bitfield import Bitfield
from rdmacast.errors import CastError, LinkClosed, ProtocolError
from rdmacast.protocol.client_link import translate
from rdmacast.protocol.frames import (
    Cancel,
    Error,
    Frame,
    Greeting,
    Have,
    HaveRequest,
    Replan,
    Report,
    Watch,
)
from rdmacast.protocol.framing import CastProtocol
from rdmacast.protocol.pull_report import PullReport, StragglerVerdict
from rdmacast.settings import LinkSettings
from rdmacast.transport import PeerAddress

OnBitfield = Callable[[Bitfield, int], None]  # the map, and the latest question that it answers, or 0
OnVerdict = Callable[[StragglerVerdict], None]


class RegionWatch(Protocol):
    """A watch of one peer's region."""

    def request_have(self, number: int) -> None:
        """Request the bitfield even if nothing changes; of several requests only the latest is answered."""
        ...

    def send_report(self, report: PullReport) -> None:
        """Report pulls to the peer's straggler detector: `on_verdict` is called with each verdict."""
        ...

    async def wait_ended(self) -> CastError:
        """Wait for the end of the watch; returns why: RegionGone if the peer itself withdrew the region."""
        ...


class Watcher(Protocol):
    """A factory of watches."""

    def watch(
        self,
        peer: PeerAddress,
        region: str,
        block_bytes: int,
        on_bitfield: OnBitfield,
        on_verdict: OnVerdict | None = None,
    ) -> AbstractAsyncContextManager[RegionWatch]:
        """Call `on_bitfield` inside as the bitfield changes; a region that is not there yet is waited for.

        Raises PeerAuthError, LinkClosed, ProtocolError.
        """
        ...

    async def prepare(self, peer: PeerAddress) -> None:
        """Connect to a peer, and stay connected for its next watch. Raises as `watch` does."""
        ...

    async def aclose(self) -> None:
        """Close what stays connected. Idempotent."""
        ...


class _Watch:
    """One watch over a connection; a RegionWatch."""

    def __init__(
        self, link: "WatchLink", id_: int, on_bitfield: OnBitfield, on_verdict: OnVerdict | None
    ) -> None:
        self.id = id_
        self.on_bitfield = on_bitfield
        self.on_verdict = on_verdict
        self._link = link
        self._end: asyncio.Future[CastError] = asyncio.get_running_loop().create_future()

    def request_have(self, number: int) -> None:
        self._link.send(HaveRequest(self.id, number))

    def send_report(self, report: PullReport) -> None:
        self._link.send(Report(self.id, report))

    async def wait_ended(self) -> CastError:
        return await asyncio.shield(self._end)

    def end(self, reason: CastError) -> None:
        if not self._end.done():
            self._end.set_result(reason)


class WatchLink(CastProtocol):
    """The watching end of a connection, for any number of watches of one peer.

    `on_closed` is called when the connection has closed.
    """

    def __init__(self, settings: LinkSettings, on_closed: Callable[["WatchLink"], None]) -> None:
        super().__init__(settings, reads_ahead=True)
        self._on_closed = on_closed
        self._greeted = False
        self._watches: dict[int, _Watch] = {}
        self._cancelled: set[int] = set()  # each gets one more frame: an Error
        self._next_id = 1

    @property
    def watches(self) -> int:
        """The number of open watches."""
        return len(self._watches)

    def open(
        self, region: str, block_bytes: int, on_bitfield: OnBitfield, on_verdict: OnVerdict | None
    ) -> RegionWatch:
        """Begin a watch. Raises LinkClosed."""
        if self.reason is not None:
            raise LinkClosed(str(self.reason))
        watch = _Watch(self, self._next_id, on_bitfield, on_verdict)
        self._next_id = self._next_id % 0xFFFFFFFF + 1
        self._watches[watch.id] = watch
        self.send(Watch(watch.id, region, block_bytes))
        return watch

    def close(self, watch: RegionWatch) -> None:
        """End a watch, unless it has ended: nothing is called for it any more."""
        assert isinstance(watch, _Watch)
        if self._watches.pop(watch.id, None) is not None:
            watch.end(watch_closed())
            if self.reason is None:
                self._cancelled.add(watch.id)
                self.send(Cancel(watch.id))

    def frame_received(self, frame: Frame) -> None:
        match frame:
            case Greeting() if not self._greeted:
                self._greeted = True
            case Have():
                if (watch := self._watch_of(frame.id)) is not None:
                    watch.on_bitfield(frame.bitfield, frame.answers)
            case Replan():  # it may have been sent just after the end of its watch
                if (watch := self._watches.get(frame.id)) is not None and watch.on_verdict is not None:
                    watch.on_verdict(frame.verdict)
            case Error():
                watch = self._watch_of(frame.id)
                self._cancelled.discard(frame.id)
                if watch is not None:
                    del self._watches[frame.id]
                    watch.end(translate(frame))
            case _:
                raise ProtocolError(f"{type(frame).__name__} was received on a watch")

    def link_closed(self, reason: CastError) -> None:
        watches, self._watches = self._watches, {}
        for watch in watches.values():
            watch.end(reason)
        self._on_closed(self)

    def _watch_of(self, id_: int) -> _Watch | None:
        """Return the watch that a frame is for; None if it was cancelled. Raises ProtocolError."""
        watch = self._watches.get(id_)
        if watch is None and id_ not in self._cancelled:
            raise ProtocolError(f"a frame for {id_}, which is no watch")
        return watch


def watch_closed() -> CastError:
    """Return the reason of watches and connections that their user closed."""
    return CastError("the watch was closed")
