"""Disaggregated serving through kills and changes of roles, with real engines: for `make soak`."""

import itertools
import json
import os
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.fixtures.decoders import write_decoder
from tests.fixtures.platform import Platform

NODES, CLIENTS = 4, 6
KILLS, CHANGES = 17, 17  # of each of three families: more than 50 in all
TOKENS = 40
PROMPTS = [[(seed * 5 + step * 7) % 97 for step in range(length)] for seed, length in enumerate((4, 20, 80))]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """Four nodes on four virtual hosts."""
    flags = ("--nodes", str(NODES), "--hosts", str(NODES), "--kv-moves", "always")
    running = Platform(data=tmp_path_factory.mktemp("four"), flags=flags)
    running.up()
    yield running
    running.down()


class Streams:
    """Clients that stream completions of the prompts in turn until `stop` is set, and compare all tokens."""

    def __init__(self, platform: Platform, function: str) -> None:
        self.stop = threading.Event()
        self._platform = platform
        self._function = function
        self._turns = itertools.count()
        self._expected = [self.tokens(prompt) for prompt in PROMPTS]

    def tokens(self, prompt: list[int]) -> list[int]:
        body = {"model": self._function, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
        more = {"ignore_eos": True, "stream": True, "return_token_ids": True}
        ids: list[int] = []
        with (
            self._platform.http() as http,
            http.stream("POST", "/v1/completions", json=body | more, timeout=120.0) as response,
        ):
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    ids += json.loads(line[6:])["choices"][0].get("token_ids") or []
        return ids

    def run(self) -> int:
        """Return the number of streams."""
        done = 0
        while not self.stop.is_set():
            place = next(self._turns) % len(PROMPTS)
            assert self.tokens(PROMPTS[place]) == self._expected[place]
            done += 1
        return done


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
    streams = Streams(four, family)  # answered by one instance
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
