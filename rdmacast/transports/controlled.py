"""Base classes of transports whose reads are controlled over a TCP connection.

The peer reports on it when a range is present, and where.
"""

import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeVar

from rdmacast.errors import CastError, ProtocolError
from rdmacast.protocol.client_link import ClientLink, open_link
from rdmacast.protocol.handshake import Secret
from rdmacast.settings import LinkSettings
from rdmacast.transport import PeerAddress

T = TypeVar("T")


def decode_reply(link: ClientLink, decode: Callable[[bytes], T], payload: bytes) -> T:
    """Decode a transport's payload. A malformed one closes the link and raises ProtocolError."""
    try:
        return decode(payload)
    except CastError as error:
        link.abort(error)
        raise


class ControlledLink:
    """The TCP connection of a Link; the end of the connection is the end of the link."""

    def __init__(self, link: ClientLink) -> None:
        self._link = link
        self._received_bytes = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._link!r})"

    @property
    def received_bytes(self) -> int:
        return self._received_bytes

    @property
    def is_reusable(self) -> bool:
        """Whether it may be kept; links that hold files or handles of regions are not."""
        return False

    async def aclose(self) -> None:
        await self._link.aclose()


class ControlledTransport:
    """The part of a Transport that opens the control connections."""

    def __init__(self, secret: Secret, tls: ssl.SSLContext | None, settings: LinkSettings | None) -> None:
        self._secret = secret
        self._tls = tls
        self._settings = settings or LinkSettings()

    def _control(self, peer: PeerAddress) -> AbstractAsyncContextManager[ClientLink]:
        return open_link(peer.url, self._secret, self._settings, tls=self._tls, reads_ahead=True)

    @asynccontextmanager
    async def _control_on_host(self, peer: PeerAddress) -> AsyncIterator[ClientLink]:
        """Open a link to a server of the peer's host. Raises ProtocolError, too, if it is on another host."""
        async with self._control(peer) as link:
            host = (await link.greeting()).host
            if host != peer.host:
                raise ProtocolError(f"{peer.url} is on host {host!r}, not on {peer.host!r}")
            yield link
