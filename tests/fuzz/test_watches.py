"""Damaged bitfields of a peer: the watch ends with a clear error, and no wrong bitfield is reported."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rdmacast.bitfield import MAX_BLOCKS, Bitfield
from rdmacast.cast.hooks import BlockHooks
from rdmacast.cast.links import CastLinks
from rdmacast.cast.record import CastMember
from rdmacast.cast.region_watcher import RegionWatcher
from rdmacast.cast.runner import Cast
from rdmacast.cast.session_settings import SessionSettings
from rdmacast.cast.spec import CastSpec
from rdmacast.errors import CastError
from rdmacast.protocol import wire
from rdmacast.server.region import GrowingRegion
from rdmacast.server.region_server import RegionServer
from rdmacast.settings import LinkSettings
from rdmacast.transport import PeerAddress
from rdmacast.transports.connector import Connector
from rdmacast.transports.tcp import TcpTransport
from tests.fixtures.cast import cast_plan
from tests.fixtures.damaged_conversations import HOSTILE_WATCH_REPLIES, SECRET, WATCH_REPLIES, damaged
from tests.fixtures.liar import liar
from tests.fixtures.patience import PATIENCE_S

LINK = LinkSettings(handshake_timeout_s=PATIENCE_S, ping_interval_s=PATIENCE_S / 4, ping_timeout_s=PATIENCE_S)
HERE = SessionSettings(ask_timeout_s=PATIENCE_S, pull_timeout_s=PATIENCE_S, min_silence_s=PATIENCE_S)


@asynccontextmanager
async def lying(says: bytes) -> AsyncIterator[PeerAddress]:
    """Serve a peer of host b that sends these bytes on every connection."""
    async with liar(wire.SERVICE, says) as url:
        yield PeerAddress(url=url, host="b")


async def test_a_watch_outlives_damaged_news() -> None:
    for raw in damaged(WATCH_REPLIES, HOSTILE_WATCH_REPLIES):
        heard: list[Bitfield] = []

        def hear(reported: Bitfield, _: int, heard: list[Bitfield] = heard) -> None:
            heard.append(reported)

        watcher = RegionWatcher(SECRET, settings=LINK)
        async with lying(raw) as peer, watcher.watch(peer, "image", 256, hear) as watch:
            watch.request_have(1)
            assert isinstance(await watch.wait_ended(), CastError)
        assert all(
            1 <= reported.blocks <= MAX_BLOCKS and not reported.held >> reported.blocks for reported in heard
        )


async def test_a_cast_takes_no_map_of_another_size_and_goes_on_without_a_liar() -> None:
    """One of two sources lies about everything; the other gives all."""
    content = bytes(range(256)) * 64
    for raw in HOSTILE_WATCH_REPLIES:
        async with RegionServer(SECRET, host="a", settings=LINK) as good, lying(raw) as bad:
            good.publish("image", GrowingRegion(content, complete=True))
            members = (
                CastMember(node="liar", host=bad.host, address=bad.url),
                CastMember(node="good", host="a", address=good.address.url),
                CastMember(node="me", host="me", address="tcp://127.0.0.1:1"),
            )
            plan = cast_plan(members, nbytes=len(content), block_bytes=256, sources=2)
            into = bytearray(len(content))
            report = await Cast(
                CastSpec(plan=plan),
                "me",
                memoryview(into),
                links=CastLinks(
                    connector=Connector("me", [TcpTransport(SECRET, settings=LINK)]),
                    watcher=RegionWatcher(SECRET, settings=LINK),
                ),
                hooks=BlockHooks(
                    check=lambda offset, view: [0] if view != content[offset : offset + len(view)] else []
                ),
                settings=HERE,
            ).run()
            assert into == content and set(report.bytes_by_peer) == {"good"}
            assert list(report.faults.lost) == ["liar"]
