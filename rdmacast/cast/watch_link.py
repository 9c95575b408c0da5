"""Hears what a peer holds of a region: on a connection of its own, so that no payload delays the news."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from rdmacast.client_link import translate
from rdmacast.connection import dial
from rdmacast.errors import CastError, ProtocolError
from rdmacast.frames import Ask, Error, Frame, Have, Hello, Steer, Tell
from rdmacast.frames import Watch as WatchRequest
from rdmacast.framing import CastProtocol
from rdmacast.have_map import HaveMap
from rdmacast.pull_report import PullReport, Verdict
from rdmacast.settings import LinkSettings
from rdmacast.transport import PeerAddress
from rdmacast.wire import SERVICE

Heard = Callable[[HaveMap, int], None]  # the map, and the latest question that it answers, or 0
Steered = Callable[[Verdict], None]

_ID = 1


class Watch(Protocol):
    """One peer's region under watch."""

    def ask(self, number: int) -> None:
        """Have the map told, even if nothing changes. Of several questions only the latest is answered."""
        ...

    def tell(self, report: PullReport) -> None:
        """Have a cast observed by what its pulls take: `steered` is called with each verdict."""
        ...

    async def ended(self) -> CastError:
        """Wait until nothing is heard any more; why. RegionGone where the peer itself withdrew."""
        ...


class Watcher(Protocol):
    """Opens watches."""

    def watch(
        self,
        peer: PeerAddress,
        region: str,
        block_bytes: int,
        heard: Heard,
        steered: Steered | None = None,
    ) -> AbstractAsyncContextManager[Watch]:
        """Inside, `heard` is called as the map changes; a region that is not there yet is waited for.

        Raises AuthError, LinkClosed, ProtocolError.
        """
        ...


class WatchLink(CastProtocol):
    """The watching end of a connection."""

    def __init__(
        self,
        settings: LinkSettings,
        region: str,
        block_bytes: int,
        heard: Heard,
        steered: Steered | None = None,
    ) -> None:
        super().__init__(settings, reads_ahead=True)
        self._request = WatchRequest(_ID, region, block_bytes)
        self._heard = heard
        self._steered = steered
        self._greeted = False
        self._end: asyncio.Future[CastError] = self._loop.create_future()

    def ask(self, number: int) -> None:
        self.send(Ask(_ID, number))

    def tell(self, report: PullReport) -> None:
        self.send(Tell(_ID, report))

    async def ended(self) -> CastError:
        return await asyncio.shield(self._end)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.send(self._request)

    def frame_received(self, frame: Frame) -> None:
        match frame:
            case Hello() if not self._greeted:
                self._greeted = True
            case Have() if frame.id == _ID:
                self._heard(frame.told, frame.answers)
            case Steer() if frame.id == _ID and self._steered is not None:
                self._steered(frame.verdict)
            case Error() if frame.id == _ID:
                self.abort(translate(frame))
            case _:
                raise ProtocolError(f"{type(frame).__name__} came to one who only watches")

    def link_closed(self, reason: CastError) -> None:
        if not self._end.done():
            self._end.set_result(reason)


class RegionWatcher:
    """Watches regions of region servers."""

    def __init__(
        self, secret: bytes, *, tls: ssl.SSLContext | None = None, settings: LinkSettings | None = None
    ) -> None:
        self._secret = secret
        self._tls = tls
        self._settings = settings or LinkSettings()

    def __repr__(self) -> str:
        return f"RegionWatcher({'TLS' if self._tls else 'no TLS'})"

    @asynccontextmanager
    async def watch(
        self,
        peer: PeerAddress,
        region: str,
        block_bytes: int,
        heard: Heard,
        steered: Steered | None = None,
    ) -> AsyncIterator[Watch]:
        link = await dial(
            peer.url,
            secret=self._secret,
            service=SERVICE,
            make_protocol=lambda: WatchLink(self._settings, region, block_bytes, heard, steered),
            timeout_s=self._settings.handshake_timeout_s,
            tls=self._tls,
        )
        try:
            yield link
        finally:
            link.abort(_closed())
            await link.wait_closed()


def _closed() -> CastError:
    return CastError("the watch was closed")
