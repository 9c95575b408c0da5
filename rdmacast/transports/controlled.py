"""What transports share whose reads a TCP connection controls: the peer says there when, and maybe where."""

import ssl
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from rdmacast.client_link import ClientLink, open_link
from rdmacast.errors import ProtocolError
from rdmacast.pacer import Pacer
from rdmacast.settings import LinkSettings
from rdmacast.transport import PeerAddress


class ControlledLink:
    """The part of a Link that is its TCP connection; that one's end is its end."""

    def __init__(self, link: ClientLink) -> None:
        self._link = link
        self._received_bytes = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._link!r})"

    @property
    def received_bytes(self) -> int:
        return self._received_bytes

    async def aclose(self) -> None:
        await self._link.aclose()


class ControlledTransport:
    """The part of a Transport that opens those connections."""

    def __init__(self, secret: bytes, tls: ssl.SSLContext | None, settings: LinkSettings | None) -> None:
        self._secret = secret
        self._tls = tls
        self._settings = settings or LinkSettings()

    def _control(
        self, peer: PeerAddress, pacer: Pacer | None = None
    ) -> AbstractAsyncContextManager[ClientLink]:
        return open_link(peer.url, self._secret, self._settings, pacer=pacer, tls=self._tls)

    @asynccontextmanager
    async def _control_on_host(self, peer: PeerAddress) -> AsyncIterator[ClientLink]:
        """Raises ProtocolError, too, where who answers is on another host than the peer."""
        async with self._control(peer) as link:
            host = (await link.hello()).host
            if host != peer.host:
                raise ProtocolError(f"{peer.url} is on host {host!r}, not on {peer.host!r}")
            yield link
