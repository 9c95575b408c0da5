"""Reads over TCP: each payload is received straight into its destination."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rdmacast.client_link import ClientLink, open_link
from rdmacast.pacer import Pacer
from rdmacast.settings import LinkSettings
from rdmacast.transport import Began, Link, PeerAddress


class TcpLink:
    """A Link over one TCP connection."""

    def __init__(self, link: ClientLink, max_read_bytes: int) -> None:
        self._link = link
        self._max_read_bytes = max_read_bytes

    def __repr__(self) -> str:
        return f"TcpLink({self._link!r})"

    @property
    def transport(self) -> str:
        return "tcp"

    @property
    def received_bytes(self) -> int:
        return self._link.received_bytes

    async def read_into(self, region: str, offset: int, into: memoryview, began: Began | None = None) -> None:
        into = writable_bytes(into)
        for start in range(0, len(into), self._max_read_bytes):
            part = into[start : start + self._max_read_bytes]
            await self._link.read(region, offset + start, part, began)

    async def aclose(self) -> None:
        await self._link.aclose()


class TcpTransport:
    """Makes TcpLinks. `link_rate_bytes_s` caps what all of them together receive."""

    def __init__(
        self,
        secret: bytes,
        *,
        link_rate_bytes_s: float | None = None,
        tls: ssl.SSLContext | None = None,
        settings: LinkSettings | None = None,
    ) -> None:
        self._secret = secret
        self._pacer = Pacer(link_rate_bytes_s) if link_rate_bytes_s else None
        self._tls = tls
        self._settings = settings or LinkSettings()

    def __repr__(self) -> str:
        return f"TcpTransport({self._pacer or 'no cap'})"

    @property
    def name(self) -> str:
        return "tcp"

    @asynccontextmanager
    async def connect(self, peer: PeerAddress) -> AsyncIterator[Link]:
        async with open_link(
            peer.url, self._secret, self._settings, pacer=self._pacer, tls=self._tls
        ) as link:
            yield TcpLink(link, max(1, (await link.hello()).max_read_bytes))


def writable_bytes(into: memoryview) -> memoryview:
    """`into` as bytes. Raises ValueError where nothing could be written to it."""
    if into.readonly:
        raise ValueError("the destination is read-only")
    return into.cast("B")
