"""Loads by cast: nodes of one process, each with its own host, over real connections."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from rdmacast.cast.record import CastMember
from registry.clock import SystemClock
from registry.messages.images import DropImage, ImageHolder, ImageRef, WarmImage
from registry.messages.node import (
    Acknowledged,
    InstanceProgress,
    Reply,
    StartInstance,
)
from registry.records.cast import CastProgress, CastRecord, CastState
from registry.records.node import NodeRecord
from tests.fixtures.invoker import FakeCluster, FakeImage, FakeNode, make_image, start_request, started
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.registry_records import cast

UNIT = 256 << 10
SLOW = ("--link-rate", "8mbit")


@asynccontextmanager
async def some_nodes(
    folder: Path, image: FakeImage, count: int, *flags: str
) -> AsyncIterator[tuple[FakeCluster, list[FakeNode]]]:
    """Nodes n0, n1, … of as many hosts, whose store has the image."""
    async with FakeCluster(folder) as cluster, AsyncExitStack() as stack:
        nodes = [
            await stack.enter_async_context(cluster.node(f"n{number}", f"h{number}", *flags))
            for number in range(count)
        ]
        await cluster.put(image)
        yield cluster, nodes


def peer(record: NodeRecord) -> CastMember:
    return CastMember(node=record.id, host=record.host, address=record.cast)


async def make_cast(whole: FakeImage, nodes: list[FakeNode], **changes: object) -> CastRecord:
    size = {"image": whole.digest, "nbytes": len(whole.data), "block_bytes": UNIT}
    members = tuple([peer(await node.record()) for node in nodes])
    return cast("c1", **{**size, "function": "f", "members": members, "planned": len(nodes), **changes})


async def put_cast(cluster: FakeCluster, whole: FakeImage, nodes: list[FakeNode]) -> CastRecord:
    made = await make_cast(whole, nodes)
    await cluster.state.put_cast(made)
    return made


def by_cast(image: FakeImage, cast: CastRecord, *holders: ImageHolder) -> ImageRef:
    return msgspec.structs.replace(image.ref(*holders), cast=cast)


def start_by(name: str, image: FakeImage, ref: ImageRef) -> StartInstance:
    return msgspec.structs.replace(start_request(name, image), image=ref)


async def last_words(cluster: FakeCluster, count: int) -> dict[str, CastProgress]:
    """Wait until that many nodes have published the end of the cast, and return their reports."""
    feed = cluster.state.watch((await cluster.state.snapshot()).cursor)
    async with asyncio.timeout(PATIENCE_S):
        while True:
            (status,) = await cluster.state.casts()
            last = {one.node: one for one in status.progress if one.is_final}
            if len(last) >= count:
                await feed.aclose()  # type: ignore[attr-defined]
                return last
            await anext(feed)


async def test_one_cast_fills_all_and_tells_of_it(tmp_path: Path) -> None:
    image = make_image("a", 3 * UNIT * 5 + 77)
    async with some_nodes(tmp_path, image, 4) as (cluster, nodes):
        await nodes[0].ask(WarmImage(image=image.ref()))
        planned = await put_cast(cluster, image, nodes)
        ref = by_cast(image, planned)
        async with asyncio.timeout(PATIENCE_S):
            starts = [node.ask(start_by(f"i{number}", image, ref)) for number, node in enumerate(nodes[1:])]
            for replies in await asyncio.gather(*starts):
                assert started(replies).start_kind == "cold"  # the engine has checked the bytes
        reported = await last_words(cluster, 3)
        assert {one.state for one in reported.values()} == {CastState.COMPLETE}
        assert all(one.held == one.blocks == 16 for one in reported.values())
        assert all(one.received == {"tcp": len(image.data)} for one in reported.values())
        assert all("tcp" in how for one in reported.values() for how in one.transports.values())
        read = [(await node.record()).counters["disk_read_bytes"] for node in nodes]
        assert read == [len(image.data), 0, 0, 0]
        sent = [(await node.record()).counters["cast_sent_bytes"] for node in nodes]
        assert sum(sent) >= 3 * len(image.data) and any(sent[1:])  # more where a pull was dropped
        for node in nodes[1:]:
            counters = (await node.record()).counters
            assert counters["cast_recv_bytes"] == counters["cast_recv_bytes_tcp"] == len(image.data)


async def test_what_is_here_already_is_told_too(tmp_path: Path) -> None:
    image = make_image("a", 5 * UNIT)
    async with some_nodes(tmp_path, image, 2) as (cluster, nodes):
        await nodes[1].ask(WarmImage(image=image.ref()))
        planned = await put_cast(cluster, image, nodes)
        await nodes[1].ask(WarmImage(image=by_cast(image, planned)))
        (reported,) = (await last_words(cluster, 1)).values()
        assert (reported.state, reported.held, reported.blocks, reported.received) == (
            CastState.COMPLETE,
            5,
            5,
            {},
        )


async def test_what_comes_another_way_is_told_too(tmp_path: Path) -> None:
    image = make_image("a", 8 * UNIT)
    async with some_nodes(tmp_path, image, 2, *SLOW) as (cluster, nodes):
        await nodes[0].ask(WarmImage(image=image.ref()))
        pull = WarmImage(image=image.ref(await nodes[0].holder()))
        async with nodes[1].channel.call(pull) as call:
            replies = aiter(call)
            await anext(replies)
            planned = await put_cast(cluster, image, nodes)
            await nodes[1].ask(WarmImage(image=by_cast(image, planned)))  # waits for that load
        (reported,) = (await last_words(cluster, 1)).values()
        assert (reported.state, reported.held, reported.received) == (CastState.COMPLETE, 8, {})


def mapped(cluster: FakeCluster, image: FakeImage) -> list[str]:
    """Where this process has the image of host h1 in its memory, or what was to become it."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in maps if f"{cluster.shm}/h1/{image.digest}" in line]


DEAD = CastMember(node="dead", host="dead", address="tcp://127.0.0.1:1")


async def test_a_cast_that_fails_costs_only_itself(tmp_path: Path) -> None:
    image = make_image("a", 5 * UNIT)
    async with some_nodes(tmp_path, image, 2) as (cluster, nodes):
        own = peer(await nodes[1].record())
        alone = await make_cast(image, nodes, members=(DEAD, own))
        await cluster.state.put_cast(alone)
        ref = by_cast(image, alone, ImageHolder(node="dead", host="dead", cast=DEAD.address, tier="host"))
        assert started(await nodes[1].ask(start_by("i1", image, ref))).start_kind == "cold"
        counters = (await nodes[1].record()).counters
        assert (counters["cast_recv_bytes"], counters["disk_read_bytes"]) == (0, len(image.data))
        (reported,) = (await last_words(cluster, 1)).values()
        assert reported.state is CastState.FAILED and "no node is left" in reported.error
        assert reported.faults == {"lost": 1}
        ref = by_cast(image, await make_cast(image, nodes, members=(DEAD, peer(await nodes[0].record()))))
        ref = msgspec.structs.replace(ref, holders=(await nodes[1].holder(),))
        assert isinstance((await nodes[0].ask(WarmImage(image=ref)))[-1], Acknowledged)
        assert (await nodes[0].record()).counters["cast_recv_bytes"] == len(image.data)


@pytest.mark.parametrize(
    "changes",
    [
        {"block_bytes": UNIT + 1},
        {"planner": "by heart"},
        {"image": "b" * 64},
        {"nbytes": UNIT},
        {"block_bytes": 1},
    ],
)
async def test_a_cast_that_makes_no_sense_is_none(tmp_path: Path, changes: dict[str, object]) -> None:
    image = make_image("a", 2 * UNIT)
    async with some_nodes(tmp_path, image, 2) as (_, nodes):
        ref = by_cast(image, await make_cast(image, nodes, **changes))
        assert isinstance((await nodes[1].ask(WarmImage(image=ref)))[-1], Acknowledged)


async def test_a_node_that_joins_late_extends_the_plan(tmp_path: Path) -> None:
    image = make_image("a", 8 * UNIT)
    async with some_nodes(tmp_path, image, 3, *SLOW) as (cluster, nodes):
        await nodes[0].ask(WarmImage(image=image.ref()))
        planned = await put_cast(cluster, image, nodes[:2])
        request = WarmImage(image=by_cast(image, planned))
        async with nodes[1].channel.call(request) as call:
            replies = aiter(call)
            while (await anext(replies)).fraction < 0.5:
                pass
            joined = await make_cast(image, nodes, planned=2, epoch=1)
            late = await nodes[2].ask(WarmImage(image=by_cast(image, joined)))
            assert isinstance(late[-1], Acknowledged)
            async for reply in replies:
                assert isinstance(reply, InstanceProgress | Acknowledged)
        reported = await last_words(cluster, 2)
        assert {one.state for one in reported.values()} == {CastState.COMPLETE}
        assert set(reported["n2"].transports) == {"n1"}
        assert "replanned" not in reported["n2"].faults


class SetBack(SystemClock):
    """A node's clock, which somebody sets back by `by_s`."""

    def __init__(self) -> None:
        self.by_s = 0.0

    def wall_s(self) -> float:  # type: ignore[override]
        return SystemClock.wall_s() - self.by_s


async def test_the_last_word_counts_though_the_clock_was_set_back(tmp_path: Path) -> None:
    image, clock = make_image("a", 8 * UNIT), SetBack()
    async with some_nodes(tmp_path, image, 1, *SLOW) as (cluster, nodes):
        async with cluster.node("n1", "h1", *SLOW, clock=clock) as node:
            await nodes[0].ask(WarmImage(image=image.ref()))
            planned = await put_cast(cluster, image, [nodes[0], node])

            def set_back(_: Reply) -> None:
                clock.by_s = 3600.0

            await node.ask(WarmImage(image=by_cast(image, planned)), set_back)
            (reported,) = (await last_words(cluster, 1)).values()
            assert reported.state is CastState.COMPLETE and clock.by_s


async def test_a_cast_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    image = make_image("a", 16 * UNIT)
    async with some_nodes(tmp_path, image, 2, *SLOW) as (cluster, nodes):
        await nodes[0].ask(WarmImage(image=image.ref()))
        planned = await put_cast(cluster, image, nodes)
        part = cluster.shm / "h1" / f"{image.digest}.part"
        async with nodes[1].channel.call(WarmImage(image=by_cast(image, planned))) as call:
            replies = aiter(call)
            await anext(replies)
            await anext(replies)
            assert part.exists()
        (reported,) = (await last_words(cluster, 1)).values()
        assert reported.state is CastState.CANCELLED and reported.held < reported.blocks
        async with asyncio.timeout(PATIENCE_S):
            while part.exists() or mapped(cluster, image):
                await nodes[1].record()
        record = await nodes[1].record()
        assert record.host_free_bytes == record.host_bytes


async def test_a_finished_cast_holds_no_memory(tmp_path: Path) -> None:
    image = make_image("a", 4 * UNIT)
    async with some_nodes(tmp_path, image, 2) as (cluster, nodes):
        await nodes[0].ask(WarmImage(image=image.ref()))
        gc.disable()
        try:
            ref = by_cast(image, await make_cast(image, nodes))
            await nodes[1].ask(WarmImage(image=ref))
            await nodes[1].ask(DropImage(image=image.digest, tier="host"))
            assert mapped(cluster, image) == []
        finally:
            gc.enable()
