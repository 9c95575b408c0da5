"""Serves regions of memory to other nodes: reads wait for bytes that are still arriving."""

import logging
import ssl
from collections.abc import Mapping

from rdmacast.address import Endpoint
from rdmacast.connection import Listener, listen
from rdmacast.cuda_ipc_lender import GpuLender
from rdmacast.errors import LinkClosed
from rdmacast.nixl_node import NixlNode
from rdmacast.observer import Observers
from rdmacast.pacer import Pacer
from rdmacast.region_table import RegionTable
from rdmacast.server_link import ServerLink
from rdmacast.settings import LinkSettings
from rdmacast.transport import PeerAddress, RegionSource
from rdmacast.turns import Turns
from rdmacast.verbs_node import VerbsNode
from rdmacast.wire import SERVICE

logger = logging.getLogger(__name__)


class RegionServer:
    """A node's server of regions; `start` it or use it as a context manager.

    `link_rate_bytes_s` caps all its transfers together. `advertise` is the host name that others
    reach it by, where that is not the one it listens on. With `verbs`, peers may read by RDMA too, with
    `nixl` by NIXL, and with `lender` those of its host from its GPU; these must outlive it.
    """

    def __init__(
        self,
        secret: bytes,
        listen: str = "tcp://127.0.0.1:0",
        host: str = "",
        *,
        advertise: str | None = None,
        link_rate_bytes_s: float | None = None,
        tls: ssl.SSLContext | None = None,
        verbs: VerbsNode | None = None,
        lender: GpuLender | None = None,
        nixl: NixlNode | None = None,
        settings: LinkSettings | None = None,
    ) -> None:
        self._secret = secret
        self._listen_url = listen
        self._host = host
        self._advertise = advertise
        self._pacer = Pacer(link_rate_bytes_s) if link_rate_bytes_s else None
        self._turns = Turns()
        self._tls = tls
        self._verbs = verbs
        self._lender = lender
        self._nixl = nixl
        self._settings = settings or LinkSettings()
        self._listener: Listener | None = None
        self._table = RegionTable()
        self._observers = Observers()
        self._links: set[ServerLink] = set()
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
            timeout_s=self._settings.handshake_timeout_s,
            tls=self._tls,
        )
        logger.info("regions of host %s are served at %s", self._host, self.address.url)

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
            url=Endpoint(self._advertise or endpoint.host, endpoint.port).url,
            host=self._host,
        )

    @property
    def counters(self) -> Mapping[str, int]:
        """`cast_sent_bytes`: payload sent by this server (who does not read over TCP takes it)."""
        return {"cast_sent_bytes": self._sent_bytes}

    @property
    def regions(self) -> tuple[str, ...]:
        return self._table.names

    def publish(self, name: str, source: RegionSource) -> None:
        """Serve `source` as `name`. Raises ValueError if the name is taken."""
        self._table.publish(name, source)

    async def withdraw(self, name: str, drain_s: float = 30.0) -> None:
        """Stop serving `name`: reads that wait get RegionGone, those being sent finish.

        When this returns nobody reads the region's memory any more; links that would hold it for
        longer than `drain_s` are closed. Unknown names are ignored.
        """
        await self._table.withdraw(name, drain_s)

    def _make_link(self) -> ServerLink:
        return ServerLink(
            self._table,
            self._host,
            self._settings,
            pacer=self._pacer,
            turns=self._turns,
            opened=self._links.add,
            closed=self._links.discard,
            count_sent=self._count_sent,
            verbs=self._verbs,
            lender=self._lender,
            nixl=self._nixl,
            observers=self._observers,
        )

    def _count_sent(self, nbytes: int) -> None:
        self._sent_bytes += nbytes
