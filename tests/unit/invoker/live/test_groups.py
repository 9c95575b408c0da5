"""Groups: nodes that hold a part of the layers each, and answer together as one that holds them all."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from registry.errors import RemoteError
from registry.images.manifest import UNIT_BYTES
from registry.messages.images import WarmImage
from registry.messages.node import CallsUsed, EndCalls, Generate, InstanceStarted, StopInstance
from registry.records.instance import InstanceState
from tests.fixtures.groups import GroupCluster, group_cluster
from tests.fixtures.invoker import FakeImage
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.stages import answer, expected_of, requests_at

CUTS = {2: (0, 2, 4), 3: (0, 1, 3, 4)}


async def ready(group: GroupCluster) -> None:
    """Let each node read its own layers, and return once the group is ready."""
    for source, member in zip(group.sources, group.group.members, strict=True):
        source.release(member.first, member.last)
    starts = group.start(await group.requests())
    for replies in await asyncio.gather(*starts):
        assert isinstance(replies[-1], InstanceStarted)


def calls(group: GroupCluster, count: int, tokens: int = 12) -> list[Generate]:
    found = requests_at(group.group.leader.instance_id, range(1, 1 + 5 * count, 5), tokens)
    return [group.generate(one) for one in found]


@pytest.mark.parametrize(
    ("kind", "count"), [("llama", 2), ("llama-tied", 3), ("qwen2-tied", 2), ("gpt2", 3), ("gpt2", 2)]
)
async def test_members_with_their_own_layers_answer_as_one_node(
    tmp_path: Path, kind: str, count: int
) -> None:
    async with asyncio.timeout(2 * PATIENCE_S), group_cluster(tmp_path, kind, CUTS[count]) as group:
        await ready(group)
        requests = calls(group, 6)
        answers = await asyncio.gather(*(answer(group.leader, one) for one in requests))
        expected = expected_of(tmp_path / kind, requests)
        assert [got.ids for got in answers] == [expected[one.request_id] for one in requests]
        nbytes = group.model.packed.manifest.nbytes
        for node, source, member in zip(group.nodes, group.sources, group.group.members, strict=True):
            record = await node.record()
            assert not record.holdings, "a part is no copy of the image"
            assert record.gpu_free_bytes <= record.gpu_bytes - member.image_bytes
            assert record.host_free_bytes == record.host_bytes
            if member.image_bytes < nbytes - UNIT_BYTES:
                assert source.missing
        ids = tuple(one.request_id for one in requests)
        for node in group.nodes:
            (used,) = await node.ask(EndCalls(request_ids=ids))
            assert isinstance(used, CallsUsed) and set(used.gpu_us) == set(ids)
            assert all(used.gpu_us.values())


async def test_an_arena_smaller_than_the_image_has_a_part_and_its_cache(tmp_path: Path) -> None:
    async with asyncio.timeout(2 * PATIENCE_S):
        async with group_cluster(tmp_path, "llama", CUTS[2], "--gpu-memory", "900KiB") as group:
            assert group.model.packed.manifest.nbytes > 900 << 10
            await ready(group)
            requests = calls(group, 2)
            answers = [await answer(group.leader, one) for one in requests]
            expected = expected_of(tmp_path / "llama", requests)
            assert [got.ids for got in answers] == [expected[one.request_id] for one in requests]
            for node, member in zip(group.nodes, group.group.members, strict=True):
                await node.ask(StopInstance(instance_id=member.instance_id, grace_s=0.0))
                record = await node.record()
                assert record.gpu_free_bytes == record.gpu_bytes


@pytest.mark.parametrize("gone", [0, 1, 2])
async def test_a_lost_member_ends_the_leader_and_its_calls_by_name(tmp_path: Path, gone: int) -> None:
    async with asyncio.timeout(2 * PATIENCE_S), group_cluster(tmp_path, "llama", CUTS[3]) as group:
        await ready(group)
        (request,) = calls(group, 1, tokens=100)
        seen: asyncio.Queue[int] = asyncio.Queue()
        running = asyncio.create_task(answer(group.leader, request, seen))
        await seen.get()
        member = group.group.members[gone]
        await group.nodes[gone].ask(StopInstance(instance_id=member.instance_id, grace_s=0.0))
        with pytest.raises(RemoteError, match=f"{member.node}: ") as lost:
            await running
        assert lost.value.code == "pipeline_lost"
        if member is not group.group.leader:
            await _until(group, InstanceState.FAILED)


async def _until(group: GroupCluster, state: InstanceState) -> None:
    """Return once the leader is in that state."""
    leader = group.group.leader.instance_id
    snapshot = await group.cluster.state.snapshot()
    if any((one.instance_id, one.state) == (leader, state) for one in snapshot.instances):
        return
    async for _, change in group.cluster.state.watch(snapshot.cursor):
        record = getattr(change, "record", None)
        if getattr(record, "instance_id", "") == leader and record.state is state:
            return


async def test_a_leader_waits_for_its_members_and_stops_when_one_cannot_load(tmp_path: Path) -> None:
    async with asyncio.timeout(2 * PATIENCE_S), group_cluster(tmp_path, "llama", CUTS[2]) as group:
        first, last = group.group.members
        group.sources[1].release(last.first, last.last)
        other, leading = group.start(await group.requests())
        await asyncio.wait([leading], timeout=0.2)
        assert not leading.done()
        await group.nodes[0].ask(StopInstance(instance_id=first.instance_id, grace_s=0.0))
        with pytest.raises(RemoteError) as lost:
            await leading
        assert lost.value.code == "pipeline_lost"
        with pytest.raises(RemoteError):
            await other


async def test_a_member_takes_no_calls(tmp_path: Path) -> None:
    async with asyncio.timeout(2 * PATIENCE_S), group_cluster(tmp_path, "llama", CUTS[2]) as group:
        await ready(group)
        (request,) = calls(group, 1)
        with pytest.raises(RemoteError) as refused:
            other = group.group.members[0].instance_id
            await answer(group.nodes[0], msgspec.structs.replace(request, instance_id=other))
        assert refused.value.code == "no_such_instance"


@pytest.mark.parametrize("whole", [True, False])
async def test_a_part_is_read_from_the_host_tier_or_alone_from_the_store(tmp_path: Path, whole: bool) -> None:
    async with asyncio.timeout(2 * PATIENCE_S), group_cluster(tmp_path, "llama", CUTS[2]) as group:
        model = group.model
        await group.cluster.put(FakeImage(bytes(model.data), model.packed.manifest, b""))
        requests = [
            msgspec.structs.replace(one, image=msgspec.structs.replace(one.image, holders=()))
            for one in await group.requests()
            if one.image is not None
        ]
        if whole:
            for node, one in zip(group.nodes, requests, strict=True):
                assert one.image is not None
                await node.ask(WarmImage(image=one.image))
        before = [(await node.record()).counters["disk_read_bytes"] for node in group.nodes]
        for replies in await asyncio.gather(*group.start(requests)):
            assert isinstance(replies[-1], InstanceStarted)
            assert replies[-1].start_kind == ("warm" if whole else "cold")
        (request,) = calls(group, 1)
        got = await answer(group.leader, request)
        assert got.ids == expected_of(tmp_path / "llama", [request])[request.request_id]
        for node, member, read_bytes in zip(group.nodes, group.group.members, before, strict=True):
            more = (await node.record()).counters["disk_read_bytes"] - read_bytes
            assert more == (0 if whole else member.image_bytes)
