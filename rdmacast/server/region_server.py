"""Serves regions of memory to other nodes: reads wait for bytes that are still arriving."""

import logging
import ssl
from collections.abc import Mapping, Sequence

from rdmacast.address import TcpAddress
from rdmacast.errors import LinkClosed
from rdmacast.exporter import Exporter
from rdmacast.pacer import Pacer
from rdmacast.protocol.connection import ConnectionListener, listen
from rdmacast.protocol.handshake import Secret
from rdmacast.protocol.wire import SERVICE
from rdmacast.server.exporter_registry import ExporterRegistry
from rdmacast.server.port_arbiter import PortArbiter
from rdmacast.server.region_table import RegionTable
from rdmacast.server.server_link import LinkEvents, ServerContext, ServerLink
from rdmacast.settings import LinkSettings
from rdmacast.stragglers.detector import StragglerDetectors
from rdmacast.transport import PeerAddress, RegionSource
from rdmacast.transports.shm.exporter import ShmExporter

logger = logging.getLogger(__name__)


class RegionServer:
    """A node's server of regions; `start` it or use it as a context manager.

    `link_rate_bytes_s` caps all its transfers together. `advertise` is the host name by which others reach it
    if that is not the one it listens on. Peers may read over TCP, by shared memory, and by the transports of
    `exporters`, which must outlive the server.
    """

    def __init__(
        self,
        secret: Secret,
        listen: str = "tcp://127.0.0.1:0",
        host: str = "",
        *,
        advertise: str | None = None,
        link_rate_bytes_s: float | None = None,
        tls: ssl.SSLContext | None = None,
        exporters: Sequence[Exporter] = (),
        settings: LinkSettings | None = None,
    ) -> None:
        self._secret = secret
        self._listen_url = listen
        self._advertise = advertise
        self._tls = tls
        self._listener: ConnectionListener | None = None
        self._table = RegionTable()
        self._context = ServerContext(
            table=self._table,
            host=host,
            settings=settings or LinkSettings(),
            pacer=Pacer(link_rate_bytes_s) if link_rate_bytes_s else None,
            arbiter=PortArbiter(),
            exporters=ExporterRegistry([ShmExporter(), *exporters]),
            detectors=StragglerDetectors(),
        )
        self._links: set[ServerLink] = set()
        self._events = LinkEvents(
            on_open=self._links.add, on_close=self._links.discard, on_sent=self._count_sent
        )
        self._sent_bytes = 0

    def __repr__(self) -> str:
        where = self._listener.endpoint.url if self._listener else "not listening"
        return f"RegionServer({where}, {len(self._table.names)} regions, {len(self._links)} links)"

    async def __aenter__(self) -> "RegionServer":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Listen. Raises OSError."""
        self._listener = await listen(
            self._listen_url,
            secret=self._secret,
            service=SERVICE,
            make_protocol=self._make_link,
            timeout_s=self._context.settings.handshake_timeout_s,
            tls=self._tls,
        )
        logger.info("regions of host %s are served at %s", self._context.host, self.address.url)

    async def aclose(self) -> None:
        """Stop listening and close every link. Idempotent."""
        if self._listener is not None:
            self._listener.close()
        for link in tuple(self._links):
            link.abort(LinkClosed("the server closed"))
            await link.finished()

    @property
    def address(self) -> PeerAddress:
        if self._listener is None:
            raise RuntimeError("the region server has not started")
        endpoint = self._listener.endpoint
        return PeerAddress(
            url=TcpAddress(self._advertise or endpoint.host, endpoint.port).url,
            host=self._context.host,
        )

    @property
    def counters(self) -> Mapping[str, int]:
        """`cast_sent_bytes`: payload sent over TCP; readers by other transports copy it themselves."""
        return {"cast_sent_bytes": self._sent_bytes}

    @property
    def regions(self) -> tuple[str, ...]:
        return self._table.names

    def publish(self, name: str, source: RegionSource) -> None:
        """Serve `source` as `name`. Raises ValueError if the name is taken."""
        self._table.publish(name, source)

    async def withdraw(self, name: str, drain_s: float = 30.0) -> None:
        """Stop serving `name`: reads that wait get RegionGone, those being sent finish.

        On return no peer reads the region's memory any more; links that hold a lease for longer than
        `drain_s` are closed. Unknown names are ignored.
        """
        await self._table.withdraw(name, drain_s)

    def _make_link(self) -> ServerLink:
        return ServerLink(self._context, self._events)

    def _count_sent(self, nbytes: int) -> None:
        self._sent_bytes += nbytes
