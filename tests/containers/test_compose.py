"""The compose file, brought up: what it says of its containers holds, and nothing is lost when one goes."""

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.containers.conftest import GATEWAYS, NODES, PROFILES, Cluster, locked_limit, note
from tests.containers.load import load_on
from tests.containers.podman import IMAGE, Podman
from tests.fixtures.patience import until_seen

pytestmark = pytest.mark.containers
EVERY = ("redis", *GATEWAYS, *NODES)
GRACE_S = 45.0  # stop_grace_period
SLOW_S = 10.0  # what to explain by the log: nothing runs then for long


@pytest.fixture(scope="module")
def coder(cluster: Cluster) -> str:
    """Deploy the example model on both nodes, with the command and the files of the image."""
    begin_s = time.monotonic()
    example = "example:tiny-coder"
    cluster.hypercast("deploy", example, "--name", "coder", "--min-instances", 2, "-o", "json")
    note("deploy", f"{time.monotonic() - begin_s:.1f} s")
    begin_s = time.monotonic()
    until_seen("both nodes run it", lambda: ready_on(cluster) == set(NODES), failing=cluster.logs)
    note("two instances ready", f"{time.monotonic() - begin_s:.1f} s later")
    return "coder"


def ready_on(cluster: Cluster) -> set[str]:
    """Return the nodes with a ready instance."""
    found = json.loads(cluster.hypercast("describe", "coder", "-o", "json"))["instances"]
    return {one["node"] for one in found if one["state"] == "ready"}


def status_of(cluster: Cluster, service: str) -> dict[str, str]:
    """Return what the kernel has on the main process of a service's container."""
    pid = cluster.compose.container(service)["State"]["Pid"]
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


@pytest.mark.parametrize("service", EVERY)
def test_containers_have_no_rights(service: str, cluster: Cluster) -> None:
    status = status_of(cluster, service)
    assert status["Uid"].split() == [("999" if service == "redis" else "10001")] * 4
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
    assert status["NoNewPrivs"] == "1"
    wrote = cluster.compose.podman.attempt(
        "exec", cluster.compose.name(service), "touch", "/var/probe", "/probe"
    )
    assert wrote.returncode and "Read-only file system" in wrote.stderr
    cluster.compose.exec(service, "touch", "/tmp/probe")


@pytest.mark.parametrize("node", NODES)
def test_nodes_share_a_host_tier_in_memory_and_may_lock_it(node: str, cluster: Cluster) -> None:
    pid = cluster.compose.container(node)["State"]["Pid"]
    (locked,) = (
        line.split()
        for line in Path(f"/proc/{pid}/limits").read_text().splitlines()
        if "locked memory" in line
    )
    limit = locked_limit()
    assert locked[3:5] == ["unlimited" if limit < 0 else str(limit)] * 2
    (mount,) = (
        line.split()
        for line in Path(f"/proc/{pid}/mounts").read_text().splitlines()
        if line.split()[1] == "/run/hypercast-shm"
    )
    assert mount[2] == "tmpfs" and "size=524288k" in mount[3]
    assert (
        cluster.compose.exec(node, "stat", "-c", "%u:%g %a", "/run/hypercast-shm").strip()
        == "10001:10001 700"
    )
    inode = cluster.compose.exec(NODES[0], "stat", "-c", "%d", "/run/hypercast-shm")
    assert cluster.compose.exec(node, "stat", "-c", "%d", "/run/hypercast-shm") == inode


async def test_a_node_killed_under_load_loses_no_request(cluster: Cluster, coder: str) -> None:
    node = NODES[0]
    before = cluster.compose.container(node)["State"]["Pid"]
    async with load_on(cluster.urls, cluster.key, cluster.logs) as load:
        await load.some_more(40)
        os.kill(before, signal.SIGKILL)  # the container's first process, and with it the container
        await load.some_more(40)
        await asyncio.to_thread(
            until_seen, "it was started again", lambda: is_anew(cluster, node, before), failing=cluster.logs
        )
        await asyncio.to_thread(cluster.until_ready, node)
        await load.some_more(20)
    note("a node killed", f"{len(load.done)} requests answered, {len(load.lost)} lost")


def is_anew(cluster: Cluster, service: str, before: int) -> bool:
    state = cluster.compose.container(service)["State"]
    return bool(state["Running"]) and state["Pid"] not in (0, before)


async def test_an_upgrade_of_the_image_under_load_loses_no_request(
    cluster: Cluster, coder: str, podman: Podman
) -> None:
    await asyncio.to_thread(
        until_seen, "both nodes run it", lambda: ready_on(cluster) == set(NODES), failing=cluster.logs
    )
    old = podman.inspect(IMAGE, "image")["Id"]
    upgraded = f"FROM {IMAGE}\nLABEL release=next\n"
    podman.run("build", "--quiet", "--pull=never", "--tag", f"localhost/{IMAGE}", "-", stdin=upgraded)
    new = podman.inspect(IMAGE, "image")["Id"]
    assert new != old
    try:
        async with load_on(cluster.urls, cluster.key, cluster.logs) as load:
            await load.some_more(20)
            for service in (*GATEWAYS, *NODES):
                begin_s = time.monotonic()
                await asyncio.to_thread(replace, cluster, service)
                await asyncio.to_thread(cluster.until_ready, service)
                note(f"{service} replaced", f"{time.monotonic() - begin_s:.1f} s until it was healthy")
                assert cluster.compose.container(service)["Image"] == new.removeprefix("sha256:")
                await load.some_more(20)
                if service in NODES:
                    await asyncio.to_thread(
                        until_seen,
                        "both nodes run it",
                        lambda: ready_on(cluster) == set(NODES),
                        failing=cluster.logs,
                    )
        note(
            "upgrade",
            f"{len(load.done)} requests answered, {load.moved} sent elsewhere, {len(load.lost)} lost",
        )
    finally:
        podman.run("tag", old, f"localhost/{IMAGE}")
    cluster.hypercast("usage", "check", "--wait", "30s")  # a difference ends it with 1


def replace(cluster: Cluster, service: str) -> None:
    """Replace a service's container by one of the present image, as `docker compose up` does."""
    name = cluster.compose.name(service)
    stopped_s = stop(cluster, service)
    cluster.replaced.append(cluster.last_lines(service))
    cluster.compose.podman.run("rm", name)
    cluster.compose.run("up", "--detach", "--no-build", "--no-deps", service, profiles=PROFILES)
    assert cluster.compose.name(service) != name
    note(f"{service} stopped", f"{stopped_s:.1f} s")


def stop(cluster: Cluster, service: str) -> float:
    """Stop a service; assert that it ends well within its time, and return how long that took, in s."""
    begin_s = time.monotonic()
    name = cluster.compose.name(service)
    cluster.compose.run("stop", service, profiles=PROFILES)
    took_s = time.monotonic() - begin_s
    state = cluster.compose.podman.inspect(name)["State"]
    assert state["ExitCode"] == 0 and took_s < GRACE_S, (service, state, cluster.logs())
    if took_s > SLOW_S:
        note(f"{service} stopped slowly", cluster.last_lines(service))
    return took_s


def test_health_checks_fail_without_redis_and_pass_again(cluster: Cluster, coder: str) -> None:
    cluster.until_ready(*EVERY)
    stop(cluster, "redis")
    until_seen("no gateway is ready", lambda: not any(map(cluster.is_ready, GATEWAYS)), failing=cluster.logs)
    cluster.compose.run("start", "redis", profiles=PROFILES)
    cluster.until_ready(*EVERY)
    cluster.hypercast("invoke", "coder", "-p", "import os\n", "-n", 8)


def test_redis_is_backed_up_and_restored(cluster: Cluster, coder: str) -> None:
    text = cluster.compose.run("run", "--rm", "--no-deps", "-T", "backup", profiles=("backup",))
    assert "/data/redis-" in text and "bytes" in text
    cluster.hypercast("deploy", "builtin:echo", "--name", "after-the-backup")
    stop(cluster, "redis")
    cluster.compose.run("run", "--rm", "--no-deps", "-T", "restore", profiles=("restore",))
    cluster.compose.run("start", "redis", profiles=PROFILES)
    cluster.until_ready(*EVERY)
    names = {one["name"] for one in json.loads(cluster.hypercast("list", "-o", "json"))}
    assert "coder" in names and "after-the-backup" not in names


def test_every_container_stops_gracefully(cluster: Cluster, coder: str) -> None:
    for service in reversed(EVERY):
        note(f"{service} stopped", f"{stop(cluster, service):.1f} s")
