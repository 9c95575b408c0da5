"""Starts of several nodes as one cast, over slow links, on a whole platform as users run it."""

import asyncio
import hashlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from benchmarks.harness.random_llama import write_random_llama
from registry.records.cast import CastProgress, CastState, CastStatus
from registry.redis.state import RedisState
from tests.fixtures.platform import Platform

NODES = 5
MODEL = "spread"


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Iterator[Platform]:
    """Five nodes on five hosts, and a model of about 55 MB, which a node holds."""
    folder = tmp_path_factory.mktemp("five")
    write_random_llama(folder / "model", root / "functions" / "tiny-coder" / "model", layers=1)
    made = Platform(
        data=folder / "data",
        flags=(
            *("--nodes", str(NODES), "--hosts", str(NODES), "--gateways", "2"),
            *("--link-rate", "120mbit", "--gpu-memory", "256MiB", "--host-memory", "256MiB"),
        ),
    )
    made.up()
    try:
        made.run("deploy", str(folder / "model"), "--name", MODEL, "--keep-alive", "10m")
        yield made
    finally:
        made.down()


@pytest.fixture
def spread(five: Platform) -> Platform:
    """All nodes are there, and one of them alone holds the model."""
    nodes = five.until("all nodes are there", lambda: len(ready(five)) == NODES and ready(five))
    five.run("scale", MODEL, "--instances", "0")
    five.until("none runs it", lambda: not five.instances(MODEL))
    (kept, *_) = five.until("a node holds it", lambda: holders(five))
    for node in sorted(set(nodes) - {kept}):
        five.run("evict", MODEL, "--tier", "gpu", "--on", node)
        five.run("evict", MODEL, "--tier", "host", "--on", node)
    five.run("evict", MODEL, "--tier", "gpu", "--on", kept)
    five.until("one node holds it", lambda: holders(five) == [kept])
    return five


def ready(five: Platform) -> list[str]:
    return [node["id"] for node in five.nodes() if node["state"] == "ready"]


def holders(five: Platform) -> list[str]:
    return [node["id"] for node in five.nodes() if f"{MODEL}:1" in node["tiers"]["host"]]


def casts(five: Platform) -> list[CastStatus]:
    """Return the latest first."""

    async def read() -> list[CastStatus]:
        async with RedisState.connect(f"unix://{five.data / 'redis.sock'}") as state:
            return await state.casts()

    return asyncio.run(read())


def reported(five: Platform) -> dict[str, CastProgress]:
    """By node, of the latest cast."""
    return {one.node: one for one in casts(five)[0].progress}


def begin(five: Platform, instances: int, on: list[str] | None = None) -> None:
    """Ask for instances, and wait until blocks of a new cast are coming."""
    before = {status.record.cast_id for status in casts(five)}
    with five.http() as http:
        wish: dict[str, Any] = {"instances": instances, "on": on or [], "wait": False}
        assert http.post(f"/admin/functions/{MODEL}/scale", json=wish).status_code == 200

    def under_way() -> bool:
        found = casts(five)
        if not found or found[0].record.cast_id in before:
            return False
        return any(0 < one.held < one.blocks for one in found[0].progress)

    five.until("a cast is under way", under_way)


def complete(five: Platform, nodes: set[str]) -> Callable[[], bool]:
    return lambda: nodes <= {node for node, one in reported(five).items() if one.state is CastState.COMPLETE}


def bytes_are_right(five: Platform, count: int = NODES) -> None:
    """So many hosts hold the image, byte by byte; what is in arenas is copied to host memory."""
    digest = casts(five)[0].record.image
    in_memory = [
        node["id"] for node in five.nodes() if f"{MODEL}:1" in {*node["tiers"]["host"], *node["tiers"]["gpu"]}
    ]
    for node in in_memory:
        five.run("warm", MODEL, "--on", node)
    cluster = asyncio.run(cluster_id(five))
    found = [
        hashlib.sha256(path.read_bytes()).hexdigest()
        for path in Path("/dev/shm").glob(f"hypercast-{cluster}/*/{digest}")
    ]
    assert len(found) == count and set(found) == {digest}


async def cluster_id(five: Platform) -> str:
    async with RedisState.connect(f"unix://{five.data / 'redis.sock'}") as state:
        return (await state.cluster_config()).cluster_id


def commands_show_it_under_way(five: Platform) -> None:
    """`hypercast casts` and `hypercast casts ID`, unless the cast ends meanwhile."""
    (shown, *_) = five.json("casts")
    detail = five.json("casts", shown["cast_id"][:6])
    table = five.run("casts", shown["cast_id"]).stdout
    assert shown["cast_id"] == casts(five)[0].record.cast_id and (shown["targets"]) == NODES - 1
    if any(one.state is CastState.RUNNING for one in reported(five).values()):
        assert (shown["state"], detail["state"]) == ("running", "running")
        assert "running" in table and "%" in table and "tcp" in table


def test_five_instances_are_one_cast(spread: Platform) -> None:
    size = spread.get(f"/admin/functions/{MODEL}")["current"]["image_bytes"]
    before, read = {status.record.cast_id for status in casts(spread)}, spread.counter("disk_read_bytes")
    begin(spread, NODES)
    commands_show_it_under_way(spread)
    spread.until("all are ready", lambda: len(spread.instances(MODEL)) == NODES)
    spread.run("scale", MODEL, "--instances", str(NODES))
    (cast,) = [status for status in casts(spread) if status.record.cast_id not in before]
    assert (len(cast.record.sources), len(cast.record.targets)) == (1, NODES - 1)
    spread.until("all have reported", complete(spread, {member.node for member in cast.record.targets}))
    for one in reported(spread).values():
        assert (one.held, one.received) == (one.blocks, {"tcp": size})
    bytes_are_right(spread)
    assert spread.counter("disk_read_bytes") == read


def test_a_killed_relay_holds_up_nobody(spread: Platform) -> None:
    begin(spread, NODES)
    cast = casts(spread)[0].record
    read = spread.counter("disk_read_bytes")
    victim = cast.targets[0].node
    size = spread.get(f"/admin/functions/{MODEL}")["current"]["image_bytes"]
    pid = pids(spread)[victim]
    spread.until(
        "the victim has blocks", lambda: victim in reported(spread) and reported(spread)[victim].held
    )
    assert any(one.state is CastState.RUNNING for one in reported(spread).values())
    os.kill(pid, signal.SIGKILL)
    others = {member.node for member in cast.targets} - {victim}
    spread.until("the others are complete", complete(spread, others))
    spread.until("the victim is ready again", lambda: len(spread.instances(MODEL)) == NODES)
    spread.run("scale", MODEL, "--instances", str(NODES))
    bytes_are_right(spread)
    assert spread.counter("disk_read_bytes") <= read  # the victim's count is gone with it
    # It came back, and received all of it again: what was in the arena ended with its process.
    (again, *_) = [
        one
        for status in casts(spread)
        for one in status.progress
        if (one.node, one.held) == (victim, one.blocks)
    ]
    assert sum(again.received.values()) == size


def test_a_cast_that_nobody_wants_any_more_leaves_nothing(spread: Platform) -> None:
    free = {node["id"]: node["host_free_bytes"] for node in spread.nodes()}
    before = connections(spread)
    begin(spread, NODES)
    targets = {member.node for member in casts(spread)[0].record.targets}
    with spread.http() as http:
        wish = {"instances": 0, "on": [], "wait": False}
        assert http.post(f"/admin/functions/{MODEL}/scale", json=wish).status_code == 200
    spread.until(
        "all have reported an end",
        lambda: {node for node, one in reported(spread).items() if one.is_final} == targets,
    )
    cancelled = {node for node, one in reported(spread).items() if one.state is CastState.CANCELLED}
    assert cancelled and {one.state for one in reported(spread).values()} <= {
        CastState.CANCELLED,
        CastState.COMPLETE,
    }
    spread.until("none runs it", lambda: not spread.instances(MODEL))

    def freed() -> bool:
        now = {node["id"]: node["host_free_bytes"] for node in spread.nodes()}
        return all(now[node] == free[node] for node in cancelled)

    spread.until("its memory is free again", freed)
    spread.until("its connections are closed", lambda: connections(spread) <= before)
    bytes_are_right(spread, NODES - len(cancelled))


def test_a_late_start_joins(spread: Platform) -> None:
    (kept,) = holders(spread)
    nodes = sorted(set(ready(spread)) - {kept})
    begin(spread, 3, nodes[:3])
    first = casts(spread)[0].record
    with spread.http() as http:  # not by the command line: the cast could be over before it has started
        wish = {"instances": 4, "on": nodes, "wait": True}
        assert http.post(f"/admin/functions/{MODEL}/scale", json=wish).status_code == 200
    joined = casts(spread)[0].record
    assert (joined.cast_id, joined.epoch, joined.planned) == (first.cast_id, 1, 4)
    assert {member.node for member in joined.targets} == set(nodes)
    spread.until("all have reported", complete(spread, set(nodes)))
    bytes_are_right(spread)


def test_a_cast_outlives_the_gateway_that_planned_it(spread: Platform) -> None:
    begin(spread, NODES)
    cast = casts(spread)[0].record
    kill_gateways(spread)
    targets = {member.node for member in cast.targets}
    spread.until("the nodes have it", complete(spread, targets))
    assert casts(spread)[0].record.cast_id == cast.cast_id
    bytes_are_right(spread)


def test_a_new_controller_finds_the_cast_that_runs_and_lets_others_join(spread: Platform) -> None:
    (kept,) = holders(spread)
    nodes = sorted(set(ready(spread)) - {kept})
    begin(spread, 3, nodes[:3])
    first = casts(spread)[0].record
    kill_gateways(spread)
    wish = {"instances": 4, "on": nodes, "wait": False}

    def asked() -> bool:
        try:
            with spread.http() as http:
                return http.post(f"/admin/functions/{MODEL}/scale", json=wish).status_code == 200
        except httpx2.HTTPError:
            return False

    spread.until("a new gateway takes a wish", asked)
    spread.until("all are ready", lambda: len(spread.instances(MODEL)) == 4)
    last = casts(spread)[0]
    assert nodes[3] in {member.node for member in last.record.targets}
    spread.until("all have reported", complete(spread, {member.node for member in last.record.targets}))
    joined_at = next(one.joined_at for one in last.record.members if one.node == nodes[3])
    ends = [one.updated_at for one in reported(spread).values() if one.node != nodes[3]]
    # Unless the cast was over by then; nodes and gateways have one clock here.
    if last.record.cast_id != first.cast_id:
        ends = [one.updated_at for one in casts(spread)[1].progress]
        joined_at = last.record.started_at
    assert (last.record.cast_id == first.cast_id) == (joined_at < max(ends))
    bytes_are_right(spread)


def pids(five: Platform) -> dict[str, int]:
    """By node."""
    return {node["id"]: node["pid"] for node in five.nodes()}


def connections(five: Platform) -> int:
    """How many there are from nodes to what nodes serve of images."""
    served = {int(node["cast"].rpartition(":")[2]) for node in five.nodes()}
    return sum(
        bool(one.raddr) and one.raddr.port in served
        for pid in pids(five).values()
        for one in psutil.Process(pid).net_connections("tcp")
    )


def kill_gateways(five: Platform) -> None:
    """All of them, whichever is the controller."""
    for name in ("gateway", "gateway-1"):
        five.process(name).kill()


def supervisor(five: Platform) -> int:
    return int(json.loads((five.data / "up.json").read_text())["pid"])
