"""Disaggregated serving through kills and changes of roles, with real engines: for `make soak`."""

import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.fixtures.checked_streams import CheckedStreams
from tests.fixtures.decoders import write_decoder
from tests.fixtures.platform import Platform

NODES, CLIENTS = 4, 6
KILLS, CHANGES = 17, 17  # of each of three families: more than 50 in all


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """Four nodes on four virtual hosts."""
    flags = ("--nodes", str(NODES), "--hosts", str(NODES), "--kv-moves", "always")
    running = Platform(data=tmp_path_factory.mktemp("four"), flags=flags)
    running.up()
    yield running
    running.down()


class Roles:
    """The roles of a function's instances, and how often one has changed."""

    def __init__(self, platform: Platform, function: str) -> None:
        self._platform = platform
        self._function = function
        self._last: dict[str, str] = {}
        self.changes = 0

    def now(self) -> dict[str, str]:
        """Return the roles by instance, and count what has changed since the last call."""
        live = self._platform.get(f"/admin/functions/{self._function}")["live"] or {}
        found: dict[str, str] = live.get("roles", {})
        self.changes += sum(found.get(id_, role) != role for id_, role in self._last.items())
        self._last = found
        return found


def kill(platform: Platform, function: str, roles: Roles, wanted: str) -> bool:
    """Kill the node of an instance with that role; return False if there is none now."""
    ids = {id_ for id_, role in roles.now().items() if role == wanted}
    pids = [one["pid"] for one in platform.instances(function) if one["instance_id"] in ids]
    try:
        os.kill(random.Random(roles.changes).choice(pids), signal.SIGKILL)
    except (IndexError, ProcessLookupError):  # it has left, and is listed still
        return False
    return True


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_no_token_is_lost_through_kills_and_changes_of_roles(
    four: Platform, tmp_path: Path, family: str
) -> None:
    write_decoder(family, tmp_path)
    four.run("deploy", str(tmp_path), "--name", family, "--keep-alive", "10m")
    streams = CheckedStreams(four, family)  # answered by one instance
    four.run("scale", family, "--serving", "disaggregated", "--instances", str(NODES))
    roles, kills = Roles(four, family), 0
    four.until("all instances have roles", lambda: len(roles.now()) == NODES, timeout_s=120)
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(streams.run) for _ in range(CLIENTS)]
        try:
            while kills < KILLS or roles.changes < CHANGES:
                wanted = ("prefill", "prefill", "decode")[kills % 3]
                killing = partial(kill, four, family, roles, wanted)
                four.until(f"a {wanted} instance is killed", killing, timeout_s=120)
                kills += 1
                four.until("all instances have roles", lambda: len(roles.now()) == NODES, timeout_s=120)
                assert not any(client.done() for client in clients), "a stream has failed"
        finally:
            streams.stop.set()
        done = sum(client.result() for client in clients)
    print(f"{family}: {done} streams through {kills} kills and {roles.changes} changes of roles")
    four.run("usage", "check", "--wait", "60s")
    four.run("delete", family, "--yes")
