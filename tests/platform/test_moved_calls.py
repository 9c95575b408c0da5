"""Streams of instances that are to stop continue on others with the same tokens, by real engines."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fixtures.checked_streams import CheckedStreams
from tests.fixtures.decoders import write_decoder
from tests.fixtures.platform import Platform

CLIENTS, MOVES = 6, 4


def moved(platform: Platform) -> int:
    """Return how many calls have moved to another instance."""
    with platform.http() as http:
        (count,) = re.findall(r"^hypercast_live_moves_total (\S+)$", http.get("/metrics").text, re.MULTILINE)
    return int(float(count))


def scale(platform: Platform, function: str, instances: int) -> None:
    with platform.http() as http:
        path = f"/admin/functions/{function}/scale"
        assert http.post(path, json={"instances": instances, "wait": False}).status_code == 200


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_streams_notice_nothing_of_instances_that_stop(tmp_path: Path, family: str) -> None:
    write_decoder(family, tmp_path / "model")
    flags = ("--nodes", "2", "--hosts", "2", "--kv-moves", "always")
    platform = Platform(data=tmp_path / "data", flags=flags)
    platform.up()
    try:
        platform.run("deploy", str(tmp_path / "model"), "--name", family, "--keep-alive", "10m")
        streams = CheckedStreams(platform, family)  # answered by one instance

        def ready(instances: int) -> bool:
            return [one["state"] for one in platform.instances(family)] == ["ready"] * instances

        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(streams.run) for _ in range(CLIENTS)]
            try:
                while moved(platform) < MOVES:
                    for instances in (2, 1):
                        scale(platform, family, instances)
                        platform.until(f"{instances} are ready", lambda n=instances: ready(n))
            finally:
                streams.stop.set()
            assert sum(client.result() for client in clients) >= CLIENTS
        assert "loaded K and V of" in platform.logs(10_000)
        platform.run("scale", family, "--instances", "0")
        platform.run("usage", "check", "--wait", "60s")
    finally:
        platform.down()
