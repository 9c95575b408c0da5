"""Watches a peer's bitfield of a region, on a connection of its own that no payload delays."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from rdmacast.bitfield import Bitfield
from rdmacast.errors import CastError, ProtocolError
from rdmacast.protocol.client_link import translate
from rdmacast.protocol.connection import dial
from rdmacast.protocol.frames import Error, Frame, Greeting, Have, HaveRequest, Replan, Report, Watch
from rdmacast.protocol.framing import CastProtocol
from rdmacast.protocol.handshake import Secret
from rdmacast.protocol.pull_report import PullReport, StragglerVerdict
from rdmacast.protocol.wire import SERVICE
from rdmacast.settings import LinkSettings
from rdmacast.transport import PeerAddress

OnBitfield = Callable[[Bitfield, int], None]  # the map, and the latest question that it answers, or 0
OnVerdict = Callable[[StragglerVerdict], None]

_ID = 1


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


class WatchLink(CastProtocol):
    """The watching end of a connection."""

    def __init__(
        self,
        settings: LinkSettings,
        region: str,
        block_bytes: int,
        on_bitfield: OnBitfield,
        on_verdict: OnVerdict | None = None,
    ) -> None:
        super().__init__(settings, reads_ahead=True)
        self._request = Watch(_ID, region, block_bytes)
        self._on_bitfield = on_bitfield
        self._on_verdict = on_verdict
        self._greeted = False
        self._end: asyncio.Future[CastError] = self._loop.create_future()

    def request_have(self, number: int) -> None:
        self.send(HaveRequest(_ID, number))

    def send_report(self, report: PullReport) -> None:
        self.send(Report(_ID, report))

    async def wait_ended(self) -> CastError:
        return await asyncio.shield(self._end)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.send(self._request)

    def frame_received(self, frame: Frame) -> None:
        match frame:
            case Greeting() if not self._greeted:
                self._greeted = True
            case Have() if frame.id == _ID:
                self._on_bitfield(frame.bitfield, frame.answers)
            case Replan() if frame.id == _ID and self._on_verdict is not None:
                self._on_verdict(frame.verdict)
            case Error() if frame.id == _ID:
                self.abort(translate(frame))
            case _:
                raise ProtocolError(f"{type(frame).__name__} was received on a watch")

    def link_closed(self, reason: CastError) -> None:
        if not self._end.done():
            self._end.set_result(reason)


class RegionWatcher:
    """A Watcher of region servers."""

    def __init__(
        self, secret: Secret, *, tls: ssl.SSLContext | None = None, settings: LinkSettings | None = None
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
        on_bitfield: OnBitfield,
        on_verdict: OnVerdict | None = None,
    ) -> AsyncIterator[RegionWatch]:
        link = await dial(
            peer.url,
            secret=self._secret,
            service=SERVICE,
            make_protocol=lambda: WatchLink(self._settings, region, block_bytes, on_bitfield, on_verdict),
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
