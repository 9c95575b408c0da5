"""Links and watches that stay open between casts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest

from rdmacast.bitfield import Bitfield
from rdmacast.cast.links import CastLinks
from rdmacast.cast.region_watcher import RegionWatcher
from rdmacast.errors import LinkClosed, RegionGone
from rdmacast.fakes.nixl import MemoryNixl
from rdmacast.server.region import GrowingRegion
from rdmacast.server.region_server import RegionServer
from rdmacast.transport import Link, PeerAddress
from rdmacast.transports.connector import Connector
from rdmacast.transports.kept_links import KeptLinks
from rdmacast.transports.nixl.exporter import NixlExporter
from rdmacast.transports.nixl.node import NixlNode
from rdmacast.transports.nixl.transport import NixlTransport
from rdmacast.transports.shm.transport import ShmTransport
from rdmacast.transports.tcp import TcpTransport
from tests.fixtures.cast import CONTENT, LINK, PATIENT, SECRET, make_rig, no_faults
from tests.fixtures.patience import until

KINDS = ["tcp", "tcp-uvloop"]


def connector(kept: KeptLinks | None) -> Connector:
    transports = [TcpTransport(SECRET, settings=LINK), ShmTransport(SECRET, settings=LINK)]
    return Connector("here", transports, kept=kept)


@asynccontextmanager
async def served(host: str = "there") -> AsyncIterator[RegionServer]:
    async with no_faults(), RegionServer(SECRET, host=host, settings=LINK) as server:
        server.publish("image", GrowingRegion(memoryview(CONTENT), complete=True))
        yield server


async def read(links: Connector, peer: PeerAddress) -> Link:
    """Read the region once, and return the link that did it."""
    buffer = bytearray(1000)
    async with links.connect(peer, links.choose(peer)) as link:
        await link.read_into("image", 7, memoryview(buffer))
        assert buffer == CONTENT[7:1007]
        return link


@pytest.mark.parametrize("kind", KINDS)
async def test_the_next_reader_gets_the_same_link(kind: str) -> None:
    async with served() as server:
        links = connector(kept := KeptLinks())
        first = await read(links, server.address)
        assert await read(links, server.address) is first and len(kept) == 1
        async with AsyncExitStack() as stack:
            choice = links.choose(server.address)
            both = [await stack.enter_async_context(links.connect(server.address, choice)) for _ in range(2)]
            assert both[0] is first and both[1] is not first
        assert len(kept) == 2
        await links.aclose()
        assert not len(kept) and not first.is_reusable


async def test_a_link_is_closed_after_its_use_where_none_are_kept() -> None:
    async with served() as server:
        links = connector(None)
        first = await read(links, server.address)
        assert not first.is_reusable and await read(links, server.address) is not first
        await links.prepare(server.address)  # does nothing
        await links.aclose()


async def test_a_link_that_broke_while_idle_is_replaced() -> None:
    async with served() as server:
        links = connector(kept := KeptLinks())
        first = await read(links, server.address)
        await first.aclose()
        assert not kept.has(server.address, "tcp")
        assert await read(links, server.address) is not first
        await links.aclose()


async def test_a_link_with_a_read_under_way_is_not_kept() -> None:
    async with served() as server:
        server.publish("growing", GrowingRegion(memoryview(CONTENT)))
        links = connector(kept := KeptLinks())
        async with links.connect(server.address, links.choose(server.address)) as link:
            waiting = asyncio.create_task(link.read_into("growing", 0, memoryview(bytearray(100))))
            await until(lambda: not link.is_reusable)  # the read is under way
            waiting.cancel()
            await asyncio.wait({waiting})
        assert not len(kept) and not link.is_reusable


async def test_links_that_hold_files_are_not_kept() -> None:
    async with served("here") as server:
        links = connector(kept := KeptLinks())
        await links.prepare(server.address)
        assert not len(kept)


async def test_links_that_hold_handles_of_regions_are_not_kept() -> None:
    network = MemoryNixl()
    with NixlNode(network) as here, NixlNode(network) as there:
        async with no_faults(), RegionServer(SECRET, host="there", exporters=[NixlExporter(there)]) as server:
            server.publish("image", GrowingRegion(memoryview(CONTENT), complete=True))
            links = Connector("here", [NixlTransport(SECRET, here)], kept=(kept := KeptLinks()))
            await read(links, server.address)
            assert not len(kept)


async def test_the_oldest_of_too_many_links_is_closed() -> None:
    async with served() as one, served() as two:
        links = connector(kept := KeptLinks(most=1))
        first, second = await read(links, one.address), await read(links, two.address)
        assert len(kept) == 1 and await read(links, two.address) is second
        await links.aclose()
        assert not first.is_reusable and not second.is_reusable


async def test_a_link_without_a_user_is_closed_after_a_while() -> None:
    async with served() as server:
        links = connector(kept := KeptLinks(idle_s=0.0))
        link = await read(links, server.address)
        await until(lambda: not len(kept))
        await links.aclose()
        assert not link.is_reusable


class Reports:
    """What a watch reports."""

    def __init__(self) -> None:
        self._received: asyncio.Queue[tuple[Bitfield, int]] = asyncio.Queue()

    def __call__(self, bitfield: Bitfield, answers: int) -> None:
        self._received.put_nowait((bitfield, answers))

    async def next(self) -> tuple[Bitfield, int]:
        return await self._received.get()


@pytest.mark.parametrize("kind", KINDS)
async def test_watches_of_a_peer_share_a_connection_that_stays(kind: str) -> None:
    async with served() as server:
        server.publish("other", GrowingRegion(memoryview(CONTENT)))
        watcher = RegionWatcher(SECRET, settings=LINK, keeps=True)
        for _ in range(2):
            image, other = Reports(), Reports()
            async with (
                watcher.watch(server.address, "image", 1000, image),
                watcher.watch(server.address, "other", 1000, other),
            ):
                assert (await image.next())[0].held and not (await other.next())[0].held
            assert repr(server).endswith("1 links)")
        await watcher.aclose()


async def test_a_watch_of_a_peer_that_is_gone_ends_and_the_next_is_refused() -> None:
    watcher = RegionWatcher(SECRET, settings=LINK, keeps=True)
    async with RegionServer(SECRET, settings=LINK) as server:
        await watcher.prepare(server.address)
    async with watcher.watch(server.address, "image", 1000, Reports()) as watch:
        assert isinstance(await watch.wait_ended(), LinkClosed)
    with pytest.raises(LinkClosed):
        async with watcher.watch(server.address, "image", 1000, Reports()):
            pass
    await watcher.aclose()


async def test_a_connection_that_breaks_without_watches_is_forgotten() -> None:
    watcher = RegionWatcher(SECRET, settings=LINK, keeps=True)
    async with served() as server:
        await watcher.prepare(server.address)
        assert "1 connections" in repr(watcher)
    await until(lambda: "0 connections" in repr(watcher))
    await watcher.aclose()


async def test_the_end_of_one_watch_leaves_the_others() -> None:
    async with served() as server:
        server.publish("other", GrowingRegion(memoryview(CONTENT)))
        watcher, image, other = RegionWatcher(SECRET, settings=LINK), Reports(), Reports()
        async with (
            watcher.watch(server.address, "other", 1000, other) as ends,
            watcher.watch(server.address, "image", 1000, image) as stays,
        ):
            await other.next()
            await server.withdraw("other")
            assert isinstance(await ends.wait_ended(), RegionGone)
            stays.request_have(5)
            while (await image.next())[1] != 5:
                pass
        assert "0 connections" in repr(watcher)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_cast_over_prepared_links_opens_no_connection(kind: str) -> None:
    async with make_rig(kind, 3, planner="chain") as rig:
        links = CastLinks(
            connector=Connector("n1", [TcpTransport(SECRET, settings=LINK)], kept=KeptLinks()),
            watcher=RegionWatcher(SECRET, settings=LINK, keeps=True),
        )
        source = rig.nodes[0]
        dead = PeerAddress(url="tcp://127.0.0.1:1", host="dead")
        await links.prepare([source.address, dead])
        before = repr(source.server)
        assert before.endswith("2 links)")
        report = await rig.cast(1, links=links).run()
        assert rig.nodes[1].buffer == CONTENT and set(report.bytes_by_peer) == {"n0"}
        assert repr(source.server) == before
        await links.aclose()


async def test_a_peer_without_the_best_transport_is_prepared_to_be_watched() -> None:
    async with served() as server:
        links = CastLinks(
            connector=Connector("here", [TcpTransport(SECRET)], require="verbs", kept=KeptLinks()),
            watcher=RegionWatcher(SECRET, settings=LINK, keeps=True),
        )
        await links.prepare([server.address])
        assert repr(server).endswith("1 links)") and "1 connections" in repr(links.watcher)
        await links.aclose()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_kept_link_that_broke_unnoticed_costs_no_source(kind: str) -> None:
    """As in a pull: the node reads several blocks at once, and leaves a source after one failed read."""
    settings = replace(PATIENT, max_failures=1)
    async with make_rig(kind, 2, planner="chain", settings=settings, tier="host") as rig:
        kept = KeptLinks()
        links = CastLinks(
            connector=Connector("n1", [TcpTransport(SECRET, settings=LINK)], kept=kept),
            watcher=RegionWatcher(SECRET, settings=LINK, keeps=True),
        )
        await links.prepare([rig.nodes[0].address])
        server = rig.nodes[0].server
        assert server is not None
        for link in tuple(server._links):  # their ends here are not read before the cast begins
            link.transport.abort()
        report = await rig.cast(1, links=links).run()
        assert rig.nodes[1].buffer == CONTENT and report.faults.failed == 0 and not report.faults.lost
        await links.aclose()
