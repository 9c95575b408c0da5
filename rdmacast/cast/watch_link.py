"""Watches a peer's bitfields of regions, on a connection of their own that no payload delays."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from rdmacast.bitfield import Bitfield
from rdmacast.errors import CastError, LinkClosed, ProtocolError
from rdmacast.protocol.client_link import translate
from rdmacast.protocol.connection import dial
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
from rdmacast.protocol.handshake import Secret
from rdmacast.protocol.pull_report import PullReport, StragglerVerdict
from rdmacast.protocol.wire import SERVICE
from rdmacast.settings import LinkSettings
from rdmacast.transport import PeerAddress
from rdmacast.transports.kept_links import KEPT_S, MAX_KEPT

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
    """The watching end of a connection, for any number of watches of one peer."""

    def __init__(self, settings: LinkSettings) -> None:
        super().__init__(settings, reads_ahead=True)
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
            watch.end(_closed())
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
            case Replan():
                if (watch := self._watch_of(frame.id)) is not None and watch.on_verdict is not None:
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

    def _watch_of(self, id_: int) -> _Watch | None:
        """Return the watch that a frame is for; None if it was cancelled. Raises ProtocolError."""
        watch = self._watches.get(id_)
        if watch is None and id_ not in self._cancelled:
            raise ProtocolError(f"a frame for {id_}, which is no watch")
        return watch


class RegionWatcher:
    """A Watcher of region servers.

    All watches of a peer share one connection. With `keeps` it stays open without watches: at most MAX_KEPT
    are idle, each for at most KEPT_S; `aclose` closes them.
    """

    def __init__(
        self,
        secret: Secret,
        *,
        tls: ssl.SSLContext | None = None,
        settings: LinkSettings | None = None,
        keeps: bool = False,
    ) -> None:
        self._secret = secret
        self._tls = tls
        self._settings = settings or LinkSettings()
        self._keeps = keeps
        self._links: dict[str, WatchLink] = {}  # the idle ones in order of their last use
        self._dialing: dict[str, asyncio.Lock] = {}
        self._expiry: dict[str, asyncio.TimerHandle] = {}  # of idle links

    def __repr__(self) -> str:
        return f"RegionWatcher({'TLS' if self._tls else 'no TLS'}, {len(self._links)} connections)"

    @asynccontextmanager
    async def watch(
        self,
        peer: PeerAddress,
        region: str,
        block_bytes: int,
        on_bitfield: OnBitfield,
        on_verdict: OnVerdict | None = None,
    ) -> AsyncIterator[RegionWatch]:
        link = await self._connected(peer.url)
        watch = link.open(region, block_bytes, on_bitfield, on_verdict)
        self._stop_expiry(peer.url)
        try:
            yield watch
        finally:
            link.close(watch)
            if not link.watches:
                await self._release(peer.url, link)

    async def prepare(self, peer: PeerAddress) -> None:
        """Connect to a peer, and keep the connection if this keeps any."""
        if self._keeps:
            link = await self._connected(peer.url)
            if not link.watches:
                await self._release(peer.url, link)

    async def aclose(self) -> None:
        """Close all connections. Idempotent."""
        for url, link in tuple(self._links.items()):
            await self._close(url, link)

    async def _connected(self, url: str) -> WatchLink:
        """Return the open connection to a peer."""
        while True:
            link = self._links.get(url)
            if link is not None and link.reason is None:
                return link
            lock = self._dialing.setdefault(url, asyncio.Lock())
            if lock.locked():
                async with lock:  # another watch dials; if it fails, this one tries itself
                    continue
            async with lock:
                try:
                    self._links[url] = link = await self._dial(url)
                finally:
                    self._dialing.pop(url, None)
            return link

    async def _dial(self, url: str) -> WatchLink:
        return await dial(
            url,
            secret=self._secret,
            service=SERVICE,
            make_protocol=lambda: WatchLink(self._settings),
            timeout_s=self._settings.handshake_timeout_s,
            tls=self._tls,
        )

    async def _release(self, url: str, link: WatchLink) -> None:
        """Keep a connection without watches, or close it."""
        if not self._keeps or link.reason is not None or self._links.get(url) is not link:
            await self._close(url, link)
            return
        self._stop_expiry(url)
        loop = asyncio.get_running_loop()
        self._expiry[url] = loop.call_later(KEPT_S, self._expire, url)
        self._links[url] = self._links.pop(url)
        if len(self._expiry) > MAX_KEPT:
            self._expire(next(one for one in self._links if one in self._expiry))

    async def _close(self, url: str, link: WatchLink) -> None:
        self._forget(url, link)
        link.abort(_closed())
        await link.wait_closed()

    def _expire(self, url: str) -> None:
        link = self._links[url]
        self._forget(url, link)
        link.abort(_closed())

    def _forget(self, url: str, link: WatchLink) -> None:
        if self._links.get(url) is link:
            del self._links[url]
            self._stop_expiry(url)

    def _stop_expiry(self, url: str) -> None:
        if (timer := self._expiry.pop(url, None)) is not None:
            timer.cancel()


def _closed() -> CastError:
    return CastError("the watch was closed")
