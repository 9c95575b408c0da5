"""Reads over TCP: each payload is received straight into its destination."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rdmacast.destination import writable_parts
from rdmacast.pacer import Pacer
from rdmacast.plan_slot import PlanSlot
from rdmacast.protocol.client_link import ClientLink, open_link
from rdmacast.protocol.handshake import Secret
from rdmacast.settings import LinkSettings
from rdmacast.transport import Link, OnStart, PeerAddress
from rdmacast.transports.controlled import ControlledLink, ControlledTransport


class TcpLink(ControlledLink):
    """A Link over one TCP connection."""

    transport = "tcp"

    def __init__(self, link: ClientLink, max_read_bytes: int) -> None:
        super().__init__(link)
        self._max_read_bytes = max_read_bytes

    @property
    def is_reusable(self) -> bool:
        return self._link.is_idle

    @property
    def received_bytes(self) -> int:
        return self._link.received_bytes

    async def read_into(
        self, region: str, offset: int, into: memoryview, on_start: OnStart | None = None
    ) -> None:
        await self._read(region, offset, into, on_start, None)

    async def read_in_slot(
        self, region: str, offset: int, into: memoryview, slot: PlanSlot, on_start: OnStart | None = None
    ) -> None:
        await self._read(region, offset, into, on_start, slot)

    async def _read(
        self, region: str, offset: int, into: memoryview, on_start: OnStart | None, slot: PlanSlot | None
    ) -> None:
        for start, part in writable_parts(into, self._max_read_bytes):
            await self._link.read(region, offset + start, part, on_start, slot)


class TcpTransport(ControlledTransport):
    """A Transport over TCP. `link_rate_bytes_s` caps what all its links together receive."""

    name = "tcp"

    def __init__(
        self,
        secret: Secret,
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
        async with open_link(
            peer.url, self._secret, self._settings, pacer=self._pacer, tls=self._tls
        ) as link:
            yield TcpLink(link, max(1, (await link.greeting()).max_read_bytes))
