"""Nodes as real processes, forked by a real zygote, over a real Redis."""

import asyncio
import contextlib
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from cli.supervise.orphans import orphans_taken
from registry.channel.client import Channel
from registry.images.manifest import UNIT_BYTES
from registry.messages.images import UnpinImage, WarmImage
from registry.messages.node import (
    Acknowledged,
    GetStatus,
    InstanceProgress,
    InstanceStarted,
    NodeStatus,
    RequestUsage,
    SettleCalls,
    StopInstance,
)
from registry.records.node import NodeRecord, Tier
from registry.records.usage import InstanceInterval
from registry.redis.state import RedisState
from tests.fixtures.invoker import make_image
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.zygote import (
    Machine,
    Zygote,
    ask,
    channel_to,
    counters,
    generate,
    holder,
    joined,
    machine_of,
    make_model,
    put,
)

CLUSTER = f"processes-{os.getpid()}"
SHM = Path("/dev/shm") / f"hypercast-{CLUSTER}"


@pytest.fixture(scope="module")
def machine(tmp_path_factory) -> Iterator[Machine]:
    with machine_of(CLUSTER, tmp_path_factory.mktemp("machine")) as machine:
        yield machine
    shutil.rmtree(SHM, ignore_errors=True)


async def only_in_host_memory(channel: Channel) -> None:
    """Return once the idle image has left the arena: it was copied to host memory first."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            (status,) = await ask(channel, GetStatus())
            if [holding.tiers for holding in status.record.holdings] == [(Tier.HOST,)]:
                return


async def test_a_real_model_starts_cold_warm_and_hot_between_hosts(machine: Machine) -> None:
    zygote = machine.zygote
    model = make_model(machine.folder / "llama")

    async def tokens(channel: Channel, instance: str) -> list[int]:
        *messages, usage = await ask(channel, generate(instance, "r", 12))
        assert isinstance(usage, RequestUsage) and usage.gpu_us > 0
        return [token for message in messages for token in message.ids]

    await put(machine.store, model.data)
    pids = [zygote.spawn("n0", "h0"), zygote.spawn("n1", "h1", "--keep-hot", "0s")]
    async with RedisState.connect(machine.redis.url) as state:
        first, second = await joined(state, "n0"), await joined(state, "n1")
        assert [first.pid, second.pid] == pids
        async with channel_to(first) as a, channel_to(second) as b:
            kinds = []
            for channel, name, holders in (
                (a, "i0", ()),
                (b, "i1", (holder(first),)),
                (b, "i2", (holder(first),)),
            ):
                started = (await ask(channel, model.start(name, *holders)))[-1]
                assert isinstance(started, InstanceStarted)
                kinds.append(started.start_kind)
            expected = await tokens(a, "i0")
            assert len(expected) == 12
            assert await tokens(b, "i1") == await tokens(b, "i2") == expected
            await ask(b, StopInstance(instance_id="i1"))
            await ask(b, StopInstance(instance_id="i2"))
            await only_in_host_memory(b)
            warm = (await ask(b, model.start("i3")))[-1]
            assert [*kinds, warm.start_kind] == ["cold", "cold", "hot", "warm"]
            assert (await counters(a))["disk_read_bytes"] == len(model.data)
            assert (await counters(b))["disk_read_bytes"] == 0
            assert (await counters(b))["cast_recv_bytes"] == len(model.data)
    for name, pid in zip(("n0", "n1"), pids, strict=True):
        os.kill(pid, signal.SIGTERM)
        assert zygote.event() == {"exited": name, "pid": pid, "code": 0}
    async with RedisState.connect(machine.redis.url) as state:
        assert (await state.snapshot()).nodes == ()
    assert not SHM.exists()


async def test_what_a_killed_node_owed_the_ledger_comes_with_its_successor(machine: Machine) -> None:
    zygote = machine.zygote
    model = make_model(machine.folder / "killed")

    async def metered(state: RedisState) -> list[InstanceInterval]:
        return [one for one in await state.intervals() if one.instance_id == "metered"]

    await put(machine.store, model.data)
    pid = zygote.spawn("p0", "p0", "--meter-interval", "100ms")
    async with RedisState.connect(machine.redis.url) as state:
        async with channel_to(await joined(state, "p0")) as channel:
            await ask(channel, model.start("metered"))
            settled = (await ask(channel, generate("metered", "settled/0", 12)))[-1].gpu_us
            await ask(channel, SettleCalls(request_ids=("settled/0",)))
            unsettled = (await ask(channel, generate("metered", "unsettled/0", 12)))[-1].gpu_us
            async with (
                channel.call(generate("metered", "long/0", 120)) as one,
                channel.call(generate("metered", "long/1", 120)) as other,
            ):
                reported = [await anext(aiter(call)) for call in (one, other)]
                os.kill(pid, signal.SIGKILL)
                killed_at = time.time()
                assert zygote.event() == {"exited": "p0", "pid": pid, "signal": signal.SIGKILL}
        before = await metered(state)
        pid = zygote.spawn("p0", "p0")
        async for _, change in state.watch((await state.snapshot()).cursor):
            record = getattr(change, "record", None)
            if isinstance(record, NodeRecord) and record.pid == pid:
                break
        os.kill(pid, signal.SIGTERM)
        assert zygote.event() == {"exited": "p0", "pid": pid, "code": 0}
        calls = [one for one in await state.lost_calls() if one.instance_id == "metered"]
        lost = {one.call_id: one.used_us for one in calls}
        intervals = await metered(state)
    assert set(lost) == {"unsettled/0", "long/0", "long/1"} and lost["unsettled/0"] == unsettled
    assert all(lost[f"long/{number}"] >= tokens.gpu_us > 0 for number, tokens in enumerate(reported))
    assert sum(one.busy_us for one in intervals) == settled + sum(lost.values())
    assert before == intervals[: len(before)]
    assert all(one.to_at == other.from_at for one, other in pairwise(intervals))
    assert all(abs(one.allocated_us - (one.to_at - one.from_at) * 1e6) < 10 for one in intervals)
    assert intervals[-1].state == "ready" and killed_at - 20 < intervals[-1].to_at <= killed_at + 0.1
    assert not list(SHM.glob(".journals/p0.*"))


async def test_a_load_killed_midway_is_taken_over_by_another_process_of_its_host(machine: Machine) -> None:
    zygote = machine.zygote
    image = make_image("large", 4 << 20)
    await put(machine.store, image.data)
    zygote.spawn("m0", "g0")
    slow = zygote.spawn("m1", "g1", "--link-rate", "2mbit")
    zygote.spawn("m2", "g1")
    async with RedisState.connect(machine.redis.url) as state:
        source, victim, heir = [await joined(state, f"m{number}") for number in range(3)]
        async with channel_to(source) as a, channel_to(victim) as b, channel_to(heir) as c:
            await ask(a, WarmImage(image=image.ref()))
            request = WarmImage(image=image.ref(holder(source)))
            async with b.call(request) as call:
                async for reply in call:
                    assert isinstance(reply, InstanceProgress) and reply.fraction < 1.0
                    break
                waiting = asyncio.create_task(ask(c, request))
                await counters(c)  # it was asked first
                assert not waiting.done()
                os.kill(slow, signal.SIGKILL)
                assert zygote.event() == {"exited": "m1", "pid": slow, "signal": signal.SIGKILL}
            assert isinstance((await waiting)[-1], Acknowledged)
            got = await counters(c)
            kept = len(image.data) - got["cast_recv_bytes"]  # blocks that the killed process had received
            assert 0 <= kept < len(image.data) and kept % UNIT_BYTES == 0 and got["disk_read_bytes"] == 0
            assert [path.name for path in (SHM / "g1").iterdir() if len(path.name) >= 64] == [image.digest]
            # The one that was killed comes back under its name, to the host tier as it is now.
            again = zygote.spawn("m1", "g1")
            snapshot = await state.snapshot()
            async for _, change in state.watch(snapshot.cursor):
                record = getattr(change, "record", None)
                if isinstance(record, NodeRecord) and record.pid == again:
                    break
            assert record.epoch > victim.epoch
            assert [holding.image for holding in record.holdings] == [image.digest]


async def test_two_nodes_of_a_host_that_load_at_once_read_the_disk_once(machine: Machine) -> None:
    zygote = machine.zygote
    image = make_image("shared", 24 << 20)
    await put(machine.store, image.data)
    for name in ("s0", "s1"):
        zygote.spawn(name, "s")
    async with RedisState.connect(machine.redis.url) as state:
        first, second = await joined(state, "s0"), await joined(state, "s1")
    async with channel_to(first) as a, channel_to(second) as b:
        request = WarmImage(image=image.ref(), pin=True)
        both = await asyncio.gather(ask(a, request), ask(b, request))
        assert all(isinstance(replies[-1], Acknowledged) for replies in both)
        read = [(await counters(channel))["disk_read_bytes"] for channel in (a, b)]
        assert sorted(read) == [0, len(image.data)]
        assert [path.name for path in (SHM / "s").iterdir() if len(path.name) == 64] == [image.digest]
        for channel in (a, b):  # one copy, and both know that it is kept
            (status,) = await ask(channel, GetStatus())
            (holding,) = status.record.holdings
            assert holding.pinned and holding.bytes == len(image.data)
        await ask(a, UnpinImage(image=image.digest))
        (status,) = await ask(b, GetStatus())
        assert not status.record.holdings[0].pinned


async def test_the_next_node_of_a_cluster_sweeps_what_a_killed_host_left(machine: Machine) -> None:
    zygote = machine.zygote
    pid = zygote.spawn("d0", "dead")
    async with RedisState.connect(machine.redis.url) as state:
        await joined(state, "d0")
        os.kill(pid, signal.SIGKILL)
        assert zygote.event() == {"exited": "d0", "pid": pid, "signal": signal.SIGKILL}
        assert (SHM / "dead").exists()
        zygote.spawn("d1", "alive")
        await joined(state, "d1")
    assert not (SHM / "dead").exists() and (SHM / "alive").exists()


async def test_a_node_outlives_its_redis_and_is_known_again(machine: Machine) -> None:
    zygote = machine.zygote
    image = make_image("b", 1 << 20)
    await put(machine.store, image.data)
    pid = zygote.spawn("k0", "k0")
    async with RedisState.connect(machine.redis.url) as state:
        record = await joined(state, "k0")
    async with channel_to(record) as channel:
        await machine.redis.kill()
        assert isinstance((await ask(channel, WarmImage(image=image.ref())))[-1], Acknowledged)
        await machine.redis.start()
        async with RedisState.connect(machine.redis.url) as state:
            snapshot = await state.snapshot()
            known = {up.record.id: up.record for up in snapshot.nodes}
            if "k0" not in known or not known["k0"].holdings:
                async for _, change in state.watch(snapshot.cursor):
                    record = getattr(change, "record", None)
                    if isinstance(record, NodeRecord) and record.id == "k0" and record.holdings:
                        break
    os.kill(pid, signal.SIGTERM)
    assert zygote.event()["code"] == 0


async def test_a_node_whose_name_was_taken_ends(machine: Machine) -> None:
    zygote = machine.zygote
    pid = zygote.spawn("t0", "t0")
    async with RedisState.connect(machine.redis.url) as state:
        record = await joined(state, "t0")
        await state.next_node_epoch("t0")
        usurper = await state.next_node_epoch("t0")
        assert usurper > record.epoch
        await state.put_node(replace(record, epoch=usurper), 5.0)
    assert zygote.event() == {"exited": "t0", "pid": pid, "code": 1}
    assert "epoch" in zygote.log("t0").read_text()


@pytest.mark.parametrize("taken", [True, False])
def test_a_node_outlives_its_zygote_where_the_zygotes_parent_takes_orphans(
    machine: Machine, taken: bool
) -> None:
    async def registered() -> NodeRecord:
        async with RedisState.connect(machine.redis.url) as state:
            return await joined(state, name)

    async def answers() -> bool:
        async with channel_to(record) as channel:
            return isinstance((await ask(channel, GetStatus()))[-1], NodeStatus)

    name = f"o{taken:d}"
    with orphans_taken() if taken else contextlib.nullcontext():
        zygote = Zygote(machine.folder, machine.redis.url)
        pid = zygote.spawn(name, name)
        fd = os.pidfd_open(pid)
        record = asyncio.run(registered())
        with zygote.process:
            zygote.process.kill()
        if taken:
            assert asyncio.run(answers())
            os.kill(pid, signal.SIGTERM)
            assert os.waitpid(pid, 0)[1] == 0
        assert select.select([fd], [], [], PATIENCE_S)[0]
        os.close(fd)
    assert "signal 15: shutting down" in zygote.log(name).read_text()


def test_bad_orders_are_answered_and_the_end_of_stdin_ends_all(machine: Machine) -> None:
    zygote = machine.zygote
    for line, message in (
        (b"nonsense", "bad command"),
        (b'{"spawn": {"id": "x"}}', "expected"),
        (b'{"spawn": {"id": "x", "argv": [1], "log": "y"}}', "list of strings"),
        (b'{"spawn": {"id": "x", "argv": [], "log": "/nowhere/x.log"}}', "cannot open"),
    ):
        zygote.send(line)
        assert message in zygote.event()["error"]
    log = str(zygote.log("bad"))
    zygote.send(json.dumps({"spawn": {"id": "bad", "argv": ["--nonsense"], "log": log}}).encode())
    assert zygote.event()["spawned"] == "bad"
    assert zygote.event()["code"] == 2
    assert "--nonsense" in Path(log).read_text()
    pid = zygote.spawn("z0", "z0")

    async def running() -> None:
        async with RedisState.connect(machine.redis.url) as state:
            await joined(state, "z0")

    asyncio.run(running())
    opened = [Path(f"/proc/{pid}/fd/{fd}").readlink() for fd in (0, 1, 2)]
    assert opened == [Path(os.devnull), zygote.log("z0"), zygote.log("z0")]
    pipes = {path.readlink() for path in Path(f"/proc/{zygote.process.pid}/fd").iterdir()}
    kept = {path.readlink() for path in Path(f"/proc/{pid}/fd").iterdir()} & pipes
    assert not any(str(target).startswith("pipe:") for target in kept), kept
    ended = zygote.stop()
    assert {event["exited"] for event in ended} >= {"z0", "m0", "m1", "m2"}
    assert all(event.get("code") == 0 for event in ended), ended
    assert not SHM.exists()
