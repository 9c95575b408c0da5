"""Loads by cast: nodes of one process, each with its own host, over real connections."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec

from registry.cast import CastMember, CastProgress, CastRecord, CastState
from registry.messages import (
    CastPeer,
    CastRef,
    Holder,
    ImageRef,
    StartInstance,
    WarmImage,
)
from registry.node import NodeRecord
from tests.invoker_fixture import FakeCluster, FakeImage, FakeNode, make_image, start_request, started
from tests.patience import PATIENCE_S

UNIT = 256 << 10
SLOW = ("--link-rate", "8mbit")


@asynccontextmanager
async def some_nodes(
    folder: Path, count: int, *flags: str
) -> AsyncIterator[tuple[FakeCluster, list[FakeNode]]]:
    """Nodes n0, n1, … of as many hosts."""
    async with FakeCluster(folder) as cluster, AsyncExitStack() as stack:
        nodes = [
            await stack.enter_async_context(cluster.node(f"n{number}", f"h{number}", *flags))
            for number in range(count)
        ]
        yield cluster, nodes


def peer(record: NodeRecord) -> CastPeer:
    return CastPeer(node=record.id, host=record.host, address=record.cast)


async def make_cast(nodes: list[FakeNode], sources: int = 1, **changes: object) -> CastRef:
    values: dict[str, object] = {
        "cast_id": "c1",
        "epoch": 0,
        "planner": "binomial",
        "block_bytes": UNIT,
        "members": tuple([peer(await node.record()) for node in nodes]),
        "sources": tuple(range(sources)),
        "planned": len(nodes),
    }
    return CastRef(**{**values, **changes})  # type: ignore[arg-type]


def by_cast(image: FakeImage, cast: CastRef, *holders: Holder) -> ImageRef:
    return msgspec.structs.replace(image.ref(*holders), cast=cast)


def start_by(name: str, image: FakeImage, ref: ImageRef) -> StartInstance:
    return msgspec.structs.replace(start_request(name, image), image=ref)


async def publish(cluster: FakeCluster, image: FakeImage, cast: CastRef) -> None:
    """Publish the record of the cast, as a gateway does."""
    await cluster.state.put_cast(
        CastRecord(
            cast_id=cast.cast_id,
            image=image.digest,
            function="f",
            version=1,
            nbytes=len(image.data),
            block_bytes=cast.block_bytes,
            planner=cast.planner,
            reason="a test",
            members=tuple(CastMember(node=m.node, host=m.host, address=m.address) for m in cast.members),
            sources=cast.sources,
            planned=cast.planned,
            started_at=1.0,
            epoch=cast.epoch,
        )
    )


async def last_words(cluster: FakeCluster, count: int) -> dict[str, CastProgress]:
    """What so many nodes told of the cast at their end; their publishers are a moment behind."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            (status,) = await cluster.state.casts()
            last = {one.node: one for one in status.progress if one.state is not CastState.RUNNING}
            if len(last) >= count:
                return last
            await asyncio.sleep(0.01)


def test_one_cast_fills_all_and_tells_of_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        image = make_image("a", 3 * UNIT * 5 + 77)
        async with some_nodes(tmp_path, 4) as (cluster, nodes):
            await cluster.put(image)
            await nodes[0].ask(WarmImage(image=image.ref()))
            cast = await make_cast(nodes)
            ref = by_cast(image, cast)
            await publish(cluster, image, cast)
            async with asyncio.timeout(PATIENCE_S):
                starts = [
                    node.ask(start_by(f"i{number}", image, ref)) for number, node in enumerate(nodes[1:])
                ]
                for replies in await asyncio.gather(*starts):
                    assert started(replies).start_kind == "cold"  # the engine has checked the bytes
            told = await last_words(cluster, 3)
            assert {one.state for one in told.values()} == {CastState.COMPLETE}
            assert all(one.held == one.blocks == 16 for one in told.values())
            assert all(one.received == {"tcp": len(image.data)} for one in told.values())
            assert all("tcp" in how for one in told.values() for how in one.transports.values())
            read = [(await node.record()).counters["disk_read_bytes"] for node in nodes]
            assert read == [len(image.data), 0, 0, 0]
            sent = [(await node.record()).counters["cast_sent_bytes"] for node in nodes]
            assert sum(sent) == 3 * len(image.data) and 0 < sent[0] < 3 * len(image.data)
            for node in nodes[1:]:
                counters = (await node.record()).counters
                assert counters["cast_recv_bytes"] == counters["cast_recv_bytes_tcp"] == len(image.data)

    asyncio.run(scenario())
