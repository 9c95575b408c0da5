"""Damaged news of what a peer holds: the watch ends with a clear error, and nothing wrong is heard."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rdmacast import wire
from rdmacast.cast import Cast
from rdmacast.cast_spec import CastSpec, Member
from rdmacast.connector import Connector
from rdmacast.errors import CastError
from rdmacast.have_map import MAX_BLOCKS, HaveMap
from rdmacast.region import GrowingRegion
from rdmacast.region_server import RegionServer
from rdmacast.session_settings import SessionSettings
from rdmacast.settings import LinkSettings
from rdmacast.tcp import TcpTransport
from rdmacast.transport import PeerAddress
from rdmacast.watching import RegionWatcher
from tests.cast_fixture import run
from tests.damaged_conversations import HOSTILE_WATCH_REPLIES, SECRET, WATCH_REPLIES, damaged
from tests.liar_fixture import liar
from tests.patience import PATIENCE_S

LINK = LinkSettings(handshake_timeout_s=PATIENCE_S, ping_interval_s=PATIENCE_S / 4, ping_timeout_s=PATIENCE_S)
HERE = SessionSettings(ask_timeout_s=PATIENCE_S, pull_timeout_s=PATIENCE_S, least_slow_s=PATIENCE_S)


@asynccontextmanager
async def lying(says: bytes) -> AsyncIterator[PeerAddress]:
    """A peer of host b that says this to each who asks it."""
    async with liar(wire.SERVICE, says) as url:
        yield PeerAddress(url=url, host="b")


def test_a_watch_outlives_damaged_news() -> None:
    async def main() -> None:
        for raw in damaged(WATCH_REPLIES, HOSTILE_WATCH_REPLIES):
            heard: list[HaveMap] = []

            def hear(told: HaveMap, _: int, heard: list[HaveMap] = heard) -> None:
                heard.append(told)

            watcher = RegionWatcher(SECRET, settings=LINK)
            async with lying(raw) as peer, watcher.watch(peer, "image", 256, hear) as watch:
                watch.ask(1)
                assert isinstance(await watch.ended(), CastError)
            assert all(1 <= told.blocks <= MAX_BLOCKS and not told.held >> told.blocks for told in heard)

    run("tcp", main())


def test_a_cast_takes_no_map_of_another_size_and_goes_on_without_a_liar() -> None:
    """One of two sources lies about everything; the other gives all."""
    content = bytes(range(256)) * 64

    async def main() -> None:
        for raw in HOSTILE_WATCH_REPLIES:
            async with RegionServer(SECRET, host="a", settings=LINK) as good, lying(raw) as bad:
                good.publish("image", GrowingRegion(content, complete=True))
                spec = CastSpec(
                    cast="c",
                    region="image",
                    nbytes=len(content),
                    block_bytes=256,
                    members=(
                        Member(name="liar", address=bad),
                        Member(name="good", address=good.address),
                        Member(name="me", address=PeerAddress(url="tcp://127.0.0.1:1", host="me")),
                    ),
                    sources=(0, 1),
                )
                into = bytearray(len(content))
                report = await Cast(
                    spec,
                    "me",
                    memoryview(into),
                    connector=Connector("me", [TcpTransport(SECRET, settings=LINK)]),
                    watcher=RegionWatcher(SECRET, settings=LINK),
                    check=lambda offset, view: [0] if view != content[offset : offset + len(view)] else [],
                    settings=HERE,
                ).run()
                assert into == content and set(report.bytes_by_peer) == {"good"}
                assert list(report.faults.lost) == ["liar"]

    run("tcp", main())
