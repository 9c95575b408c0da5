"""Which connections go before others, and which leave the link to all others."""

import asyncio
import socket
from collections.abc import Callable

import pytest

from rdmacast.protocol.client_link import open_link
from rdmacast.protocol.connection import listen
from rdmacast.protocol.framing import CastProtocol
from rdmacast.protocol.priority import make_bulk, make_urgent
from rdmacast.protocol.wire import SERVICE
from rdmacast.server.exporter_registry import ExporterRegistry
from rdmacast.server.port_arbiter import PortArbiter
from rdmacast.server.region_table import RegionTable
from rdmacast.server.server_link import LinkEvents, ServerContext, ServerLink
from rdmacast.settings import LinkSettings
from rdmacast.stragglers.detector import StragglerDetectors
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.transport import SECRET

MARKS = [(make_urgent, 6, 0x10), (make_bulk, 2, 0x08)]


@pytest.mark.parametrize(("mark", "priority", "tos"), MARKS)
def test_a_mark_sets_the_priority_of_one_connection(
    mark: Callable[[socket.socket], None], priority: int, tos: int
) -> None:
    connection, other = socket.socketpair()
    with connection, other:
        mark(connection)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) == priority
        assert other.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) == 0


@pytest.mark.parametrize(("mark", "priority", "tos"), MARKS)
@pytest.mark.parametrize(
    ("address", "family", "level", "field"),
    [
        ("127.0.0.1", socket.AF_INET, socket.IPPROTO_IP, socket.IP_TOS),
        ("::1", socket.AF_INET6, socket.IPPROTO_IPV6, socket.IPV6_TCLASS),
    ],
)
def test_packets_say_so_on_their_way(
    address: str,
    family: int,
    level: int,
    field: int,
    mark: Callable[[socket.socket], None],
    priority: int,
    tos: int,
) -> None:
    try:
        listening = socket.create_server((address, 0), family=family)
    except OSError as error:
        pytest.skip(f"nothing can listen at {address}: {error}")
    with listening, socket.create_connection(listening.getsockname()[:2]) as connection:
        mark(connection)
        assert connection.getsockopt(level, field) == tos
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) == priority


def test_a_connection_that_cannot_be_marked_is_left_as_it_is() -> None:
    connection, other = socket.socketpair()
    connection.close()
    with other:
        make_urgent(connection)


async def test_regions_are_served_in_bulk() -> None:
    opened: asyncio.Future[ServerLink] = asyncio.get_running_loop().create_future()
    context = ServerContext(
        table=RegionTable(),
        host="a",
        settings=LinkSettings(),
        pacer=None,
        arbiter=PortArbiter(),
        exporters=ExporterRegistry([]),
        detectors=StragglerDetectors(),
    )
    events = LinkEvents(on_open=opened.set_result, on_close=lambda _: None, on_sent=lambda _: None)
    listener = await listen(
        "tcp://127.0.0.1:0",
        secret=SECRET,
        service=SERVICE,
        make_protocol=lambda: ServerLink(context, events),
        timeout_s=PATIENCE_S,
    )
    async with open_link(listener.endpoint.url, SECRET, LinkSettings()) as reading:
        serving = await opened
        assert _priority(serving) == 2
        assert _priority(reading) == 0
    listener.close()
    await serving.finished()


def _priority(link: CastProtocol) -> int:
    connection = link.transport.get_extra_info("socket")
    return int(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY))
