"""Reads over TCP: each payload is received straight into its destination."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rdmacast.client_link import ClientLink
from rdmacast.controlled import ControlledLink, ControlledTransport
from rdmacast.destination import writable_parts
from rdmacast.due import Due
from rdmacast.pacer import Pacer
from rdmacast.settings import LinkSettings
from rdmacast.transport import Began, Link, PeerAddress


class TcpLink(ControlledLink):
    """A Link over one TCP connection."""

    transport = "tcp"

    def __init__(self, link: ClientLink, max_read_bytes: int) -> None:
        super().__init__(link)
        self._max_read_bytes = max_read_bytes

    @property
    def received_bytes(self) -> int:
        return self._link.received_bytes

    async def read_into(self, region: str, offset: int, into: memoryview, began: Began | None = None) -> None:
        await self._read(region, offset, into, began, None)

    async def read_in_turn(
        self, region: str, offset: int, into: memoryview, due: Due, began: Began | None = None
    ) -> None:
        await self._read(region, offset, into, began, due)

    async def _read(
        self, region: str, offset: int, into: memoryview, began: Began | None, due: Due | None
    ) -> None:
        for start, part in writable_parts(into, self._max_read_bytes):
            await self._link.read(region, offset + start, part, began, due)


class TcpTransport(ControlledTransport):
    """Makes TcpLinks. `link_rate_bytes_s` caps what all of them together receive."""

    name = "tcp"

    def __init__(
        self,
        secret: bytes,
        *,
        link_rate_bytes_s: float | None = None,
        tls: ssl.SSLContext | None = None,
        settings: LinkSettings | None = None,
    ) -> None:
        super().__init__(secret, tls, settings)
        self._pacer = Pacer(link_rate_bytes_s) if link_rate_bytes_s else None

    def __repr__(self) -> str:
        return f"TcpTransport({self._pacer or 'no cap'})"

    @asynccontextmanager
    async def connect(self, peer: PeerAddress) -> AsyncIterator[Link]:
        async with self._control(peer, self._pacer) as link:
            yield TcpLink(link, max(1, (await link.hello()).max_read_bytes))
