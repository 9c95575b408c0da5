"""A model larger than any node's arena, on a whole platform: several nodes are one instance of it."""

import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.live_serving.models import write_model
from tests.fixtures.platform import Platform

NAME = "large"
WIDTH = 384  # 63 MB
LAYERS = 8
# Prompts by how many tokens each asks for.
PROMPTS = {40: (5, 6, 7), 56: tuple(range(100, 140)), 72: (9,) * 12, 96: (1000, 3, 77)}
KILLS = int(os.environ.get("HYPERCAST_GROUP_KILLS", "20"))  # of `make soak`

Expected = Callable[[str], dict[int, list[int]]]


@contextmanager
def platform_of(data: Path, model: Path, *flags: str) -> Iterator[Platform]:
    made = Platform(data=data, flags=flags)
    made.up()
    try:
        limits = ("--max-instances", "1", "--keep-alive", "10m")
        made.run("deploy", str(model), "--name", NAME, "--dtype", "float32", *limits)
        yield made
    finally:
        made.down()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Write the model of a family, once."""
    made: dict[str, Path] = {}

    def model(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            assert write_model(family, WIDTH, made[family]) > 55_000_000
        return made[family]

    return model


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, models: Callable[[str], Path]) -> Expected:
    """Return what one node with a large arena answers."""
    known: dict[str, dict[int, list[int]]] = {}

    def answers(family: str) -> dict[int, list[int]]:
        if family not in known:
            data = tmp_path_factory.mktemp("one") / "data"
            with platform_of(data, models(family), "--nodes", "1") as one:
                known[family] = all_ids(one)
                (instance,) = one.json("describe", NAME)["instances"]
                assert instance["group"] is None
        return known[family]

    return answers


def body(tokens: int) -> dict[str, Any]:
    asked = {"model": NAME, "prompt": PROMPTS[tokens], "max_tokens": tokens, "temperature": 0}
    return {**asked, "ignore_eos": True, "return_token_ids": True}


def ids_of(platform: Platform, tokens: int) -> list[int]:
    with platform.http() as http:
        response = http.post("/v1/completions", json=body(tokens))
    assert response.status_code == 200, response.text
    ids: list[int] = response.json()["choices"][0]["token_ids"]
    return ids


def all_ids(platform: Platform) -> dict[int, list[int]]:
    """Return the answers to all prompts, asked at once."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return dict(zip(PROMPTS, pool.map(lambda one: ids_of(platform, one), PROMPTS), strict=True))


def streamed(platform: Platform, tokens: int, begun: threading.Event) -> list[int]:
    """Return the tokens of a stream; it has begun once a few of them are here."""
    ids: list[int] = []
    asked = {**body(tokens), "stream": True}
    with platform.http() as http, http.stream("POST", "/v1/completions", json=asked) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                for choice in event["choices"]:
                    ids += choice.get("token_ids") or []
                if len(ids) > 5:
                    begun.set()
    return ids


def group_of(platform: Platform) -> dict[str, Any]:
    """Return the group of the one instance, which is ready."""
    (instance,) = platform.json("describe", NAME)["instances"]
    assert instance["state"] == "ready"
    group: dict[str, Any] = instance["group"]
    return group


def check_books(platform: Platform) -> None:
    """Stop the group, and check that all of its members' time is accounted for."""
    platform.run("scale", NAME, "--instances", "0")
    platform.until("all members have stopped", lambda: not platform.instances(NAME))
    platform.run("usage", "check", "--wait", "60s")


def answers_through_a_kill(platform: Platform, victim: str, wait_s: float = 0.0) -> dict[int, list[int]]:
    """Return the answers of streams that have all begun when a node is killed."""
    begun = {tokens: threading.Event() for tokens in PROMPTS}
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        running = [pool.submit(streamed, platform, one, begun[one]) for one in PROMPTS]
        for event in begun.values():
            assert event.wait(120)
        time.sleep(wait_s)
        platform.process(victim).kill()
        return dict(zip(PROMPTS, [one.result() for one in running], strict=True))


# Two arenas of 40 MiB have no room for the KV cache, and no host memory has the whole image.
@pytest.mark.parametrize(
    ("family", "nodes", "sizes", "members"),
    [
        ("llama", 2, ("--gpu-memory", "48MiB"), 2),
        ("qwen2", 3, ("--gpu-memory", "40MiB", "--host-memory", "40MiB"), 3),
    ],
)
def test_several_nodes_answer_as_one_large_one(
    tmp_path: Path,
    models: Callable[[str], Path],
    expected: Expected,
    family: str,
    nodes: int,
    sizes: tuple[str, ...],
    members: int,
) -> None:
    flags = ("--nodes", str(nodes), "--hosts", str(nodes), *sizes)
    with platform_of(tmp_path / "data", models(family), *flags) as platform:
        assert all_ids(platform) == expected(family)
        parts = group_of(platform)["members"]
        assert len({one["node"] for one in parts}) == members
        edges = [0, *(one["last"] for one in parts)]
        assert [one["first"] for one in parts] == edges[:-1] and edges[-1] == LAYERS
        shown = platform.run("describe", NAME).stdout
        assert "1 ready, 0 starting" in shown and f"{parts[0]['node']}[0,{parts[0]['last']})" in shown
        with platform.http() as http:
            response = http.post("/v1/completions", json=body(40))
        slices = platform.json("usage", "show", response.headers["x-request-id"])["gpu"]
        assert {one["node"] for one in slices} == {one["node"] for one in parts}
        assert all(one["gpu_us"] > 0 for one in slices)
        check_books(platform)


def test_streams_continue_when_members_are_killed(
    tmp_path: Path, models: Callable[[str], Path], expected: Expected
) -> None:
    flags = ("--nodes", "3", "--hosts", "3", "--gpu-memory", "48MiB")
    with platform_of(tmp_path / "data", models("llama"), *flags) as platform:
        ids_of(platform, 40)
        for place in (0, -1):  # the last member is the leader
            victim = group_of(platform)["members"][place]["node"]
            assert answers_through_a_kill(platform, victim) == expected("llama")
            assert ids_of(platform, 40) == expected("llama")[40]
        check_books(platform)


@pytest.mark.soak
def test_no_token_changes_through_random_kills(
    tmp_path: Path, models: Callable[[str], Path], expected: Expected
) -> None:
    flags = ("--nodes", "3", "--hosts", "3", "--gpu-memory", "48MiB")
    draw = random.Random()
    with platform_of(tmp_path / "data", models("llama"), *flags) as platform:
        for number in range(KILLS):
            ids_of(platform, 40)
            victim = draw.choice(group_of(platform)["members"])["node"]
            answers = answers_through_a_kill(platform, victim, draw.uniform(0.0, 1.0))
            assert answers == expected("llama"), f"kill {number}, of {victim}"
            print(f"kill {number + 1} of {KILLS}: {victim}, all tokens the same", flush=True)
        check_books(platform)
