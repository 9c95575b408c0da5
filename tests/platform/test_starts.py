"""Starts from every tier, scale to zero and back, nodes that join, leave and die."""

import asyncio
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
from openai import AsyncOpenAI, OpenAI

from benchmarks.harness.random_llama import write_random_llama
from tests.fixtures import prefork
from tests.fixtures.platform import Platform


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """Three nodes on three virtual hosts that hold nothing else: no copy moves to balance them."""
    running = Platform(
        data=tmp_path_factory.mktemp("platform"),
        flags=("--nodes", "3", "--hosts", "3", "--keep-hot", "0s"),
    )
    running.up()
    yield running
    running.down()


@pytest.fixture(scope="module")
def big(platform: Platform, root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield a random model of about 110 MB."""
    folder = tmp_path_factory.mktemp("checkpoints") / "big"
    write_random_llama(folder, root / "functions" / "tiny-coder" / "model", layers=2)
    options = ["--keep-alive", "10m", "--max-instances", "1", "--live", "off"]  # for starts of known kinds
    platform.run("deploy", str(folder), "--name", "big", *options)
    yield "big"
    platform.run("delete", "big", "--yes")


def start_kind(platform: Platform, model: str) -> tuple[str, str]:
    with platform.http() as http:
        return start_kind_over(http, platform, model)


def start_kind_over(http: httpx2.Client, platform: Platform, model: str) -> tuple[str, str]:
    wish = {"model": model, "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    answer = http.post("/v1/completions", json=wish).raise_for_status()
    timing, kind = answer.headers["server-timing"], answer.headers["x-start-kind"]
    assert all(f"{part};dur=" in timing for part in ("queue", "load", "exec"))
    # The phases of a start stand there for those who waited for it.
    assert ("bind;dur=" in timing) == (kind != "hot")
    record = platform.get(f"/admin/usage/show/{answer.headers['x-request-id']}")
    return kind, record["node"]


def holders(platform: Platform, model: str) -> set[str]:
    return {node["id"] for node in platform.nodes() if f"{model}:1" in node["tiers"]["host"]}


def starts(platform: Platform) -> int:
    return sum(platform.counter(f"starts_{kind}") for kind in ("hot", "warm", "cold"))


def asleep(platform: Platform, model: str) -> None:
    platform.run("scale", model, "--instances", "0")
    platform.until(f"{model} is asleep", lambda: not platform.instances(model))


def test_cold_then_warm_then_hot_moves_no_byte_from_disk(platform: Platform, big: str) -> None:
    have = platform.until("a node holds it", lambda: holders(platform, big))
    target = sorted({node["id"] for node in platform.nodes()} - have)[0]
    before = platform.counter("disk_read_bytes") + platform.counter("store_read_bytes")
    received = platform.counter("cast_recv_bytes")
    with platform.http() as http:  # not by the command line: the start would be over before it ends
        wish = {"instances": 1, "on": [target], "wait": False}
        assert http.post(f"/admin/functions/{big}/scale", json=wish).status_code == 200
        assert start_kind_over(http, platform, big) == ("cold", target)
    assert start_kind(platform, big) == ("hot", target)
    asleep(platform, big)
    platform.until("it left the arenas", lambda: not any(node["tiers"]["gpu"] for node in platform.nodes()))
    kind, node = start_kind(platform, big)
    assert kind == "warm"
    assert node in have | {target}
    size = platform.get(f"/admin/functions/{big}")["current"]["image_bytes"]
    platform.until("the counter is published", lambda: platform.counter("cast_recv_bytes") == received + size)
    assert platform.counter("disk_read_bytes") + platform.counter("store_read_bytes") == before


def test_the_cast_that_brought_it_is_shown_and_counted(platform: Platform, big: str) -> None:
    def over() -> bool:
        return bool(
            [cast for cast in platform.json("casts", "--function", big) if cast["state"] != "running"]
        )

    platform.until("its end is reported", over)
    cast = platform.json("casts", "--function", big)[-1]
    size = platform.get(f"/admin/functions/{big}")["current"]["image_bytes"]
    assert (cast["state"], cast["done"], cast["targets"], cast["nbytes"]) == ("complete", 1, 1, size)
    assert sum(cast["received"].values()) == size
    source, target = cast["nodes"]
    assert (source["state"], target["held"]) == ("source", cast["blocks"])
    assert f"{target['node']} from {source['node']} over" in platform.run("casts", cast["cast_id"]).stdout
    with platform.http() as http:
        counted = f'hypercast_cast_duration_seconds_count{{function="{big}",state="complete"}} 1.0'
        platform.until("the feed has its end", lambda: counted in http.get("/metrics").text)


def test_two_hundred_requests_wake_it(platform: Platform, big: str) -> None:
    asleep(platform, big)
    read = platform.counter("disk_read_bytes") + platform.counter("store_read_bytes")
    began = starts(platform)

    async def flood() -> Counter[str]:
        async with AsyncOpenAI(base_url=f"{platform.url}/v1", api_key=platform.key, max_retries=0) as client:

            async def one(index: int) -> str:
                raw = await client.completions.with_raw_response.create(
                    model=big, prompt=[3 + index % 7], max_tokens=2, extra_body={"ignore_eos": True}
                )
                return str(raw.headers["x-start-kind"])

            return Counter(await asyncio.gather(*map(one, range(200))))

    kinds = asyncio.run(flood())
    assert kinds.total() == 200
    assert "warm" in kinds
    platform.until("the counters are published", lambda: starts(platform) > began)
    assert starts(platform) <= began + 2
    assert platform.counter("disk_read_bytes") + platform.counter("store_read_bytes") == read


def test_a_killed_node_is_replaced_and_the_function_answers_elsewhere(platform: Platform, big: str) -> None:
    _, node = start_kind(platform, big)
    victim = next(record for record in platform.nodes() if record["id"] == node)
    os.kill(victim["pid"], signal.SIGKILL)
    start_kind(platform, big)
    platform.until(
        "the node is there again",
        lambda: any(
            record["id"] == node and record["pid"] != victim["pid"] and record["state"] == "ready"
            for record in platform.nodes()
        ),
    )


@contextmanager
def late_node(platform: Platform, *flags: str) -> Iterator[prefork.Process | subprocess.Popen[bytes]]:
    """Yield a node called `late` that joins by itself, as on another machine."""
    command = [
        *("--node-id", "late", "--host-id", "host-late", "--lease-s", "2"),
        *("--redis-url", f"unix://{platform.data}/redis.sock"),
        *("--device", "cpu", "--threads", "1"),
        *("--gpu-memory", "512MiB", "--host-memory", "512MiB", *flags),
    ]
    with (platform.data / "logs" / "late.log").open("wb") as log:
        process = prefork.start("invoker", *command, log=log)
    try:
        platform.until("it has joined", lambda: "late" in {node["id"] for node in platform.nodes()})
        yield process
    finally:
        process.kill()
        process.wait()


def only_on_late(platform: Platform, model: str) -> None:
    asleep(platform, model)
    platform.run("scale", model, "--instances", "1", "--on", "late")
    assert {item["node"] for item in platform.instances(model)} == {"late"}


def test_a_node_joins_and_leaves(platform: Platform, big: str) -> None:
    with late_node(platform):
        only_on_late(platform, big)
    platform.until(
        "it is gone within its lease", lambda: "late" not in {node["id"] for node in platform.nodes()}
    )
    kind, node = start_kind(platform, big)
    assert node != "late", kind


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stream_outlives_the_node_that_serves_it(
    platform: Platform, big: str, number: signal.Signals
) -> None:
    with OpenAI(base_url=f"{platform.url}/v1", api_key=platform.key, max_retries=0) as client:

        def stream(interrupt: Callable[[], None] | None) -> list[int]:
            ids: list[int] = []
            for chunk in client.completions.create(
                model=big,
                prompt=[5, 6, 7],
                max_tokens=60,
                temperature=0.7,
                seed=11,
                stream=True,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            ):
                ids += [token for choice in chunk.choices for token in choice.token_ids]  # type: ignore[attr-defined]
                if interrupt is not None and len(ids) >= 5:
                    interrupt()
                    interrupt = None
            return ids

        wanted = stream(None)
        assert len(wanted) == 60
        with late_node(platform, "--grace", "100ms") as process:
            only_on_late(platform, big)
            assert stream(lambda: process.send_signal(number)) == wanted
    platform.until("it is gone", lambda: "late" not in {node["id"] for node in platform.nodes()})
