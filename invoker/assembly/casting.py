"""What serves and reads images and K and V: the region server, the links and the listener."""

from contextlib import AsyncExitStack
from dataclasses import dataclass

from invoker.assembly.setup import NodeSetup
from invoker.links.listener import StageListener
from invoker.loading.transports import CastTransports, make_connector, open_transports
from invoker.memory.arena import Arena
from rdmacast.address import TcpAddress
from rdmacast.cast.links import CastLinks
from rdmacast.cast.region_watcher import RegionWatcher
from rdmacast.server.region_server import RegionServer


@dataclass(frozen=True, slots=True, kw_only=True)
class Casting:
    """The server that other nodes read images from, the listener for pipelines, and the links to others."""

    regions: RegionServer
    listener: StageListener
    links: CastLinks
    transports: CastTransports


def open_casting(setup: NodeSetup, arena: Arena, stack: AsyncExitStack) -> Casting:
    settings = setup.settings
    transports = open_transports(settings, arena, stack)
    regions = RegionServer(
        settings.secret,
        TcpAddress(settings.listen_host, settings.cast_port).url,
        settings.host_id,
        advertise=settings.advertise,
        link_rate_bytes_s=settings.link_rate_bytes_s,
        tls=transports.tls.server,
        exporters=transports.exporters,
    )
    links = CastLinks(
        connector=make_connector(settings, setup.root, transports),
        watcher=RegionWatcher(settings.secret, tls=transports.tls.client, keeps=True),
    )
    stack.push_async_callback(links.aclose)
    address = settings.listen_host, settings.stage_port, settings.advertise
    listener = StageListener(*address, settings.host_id, settings.secret, transports.tls)
    return Casting(regions=regions, listener=listener, links=links, transports=transports)
