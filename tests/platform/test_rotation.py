"""The cluster's secret changes while requests are served: of two files, one after the other."""

import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.local_platform import RunningPlatform
from benchmarks.harness.processes import ROOT
from registry.channel.client import Channel
from registry.errors import ChannelError
from registry.redis.state import RedisState
from tests.fixtures import prefork
from tests.fixtures.platform import Platform

NAME = "coder"


@pytest.fixture
def platform(tmp_path: Path) -> Iterator[Platform]:
    made = Platform(
        data=tmp_path / "data",
        flags=("--nodes", "1", "--gateways", "2", "--device", "cpu", "--host-memory", "512MiB"),
    )
    made.up()
    yield made
    made.down()


class OtherMachine:
    """A node with a secret file of its own."""

    def __init__(self, platform: Platform, secret_file: Path) -> None:
        self._platform = platform
        self._command = [
            *("--node-id", "other", "--host-id", "host-other"),
            *("--redis-url", f"unix://{platform.data}/redis.sock", "--secret-file", str(secret_file)),
            *("--device", "cpu", "--threads", "1", "--gpu-memory", "512MiB", "--host-memory", "512MiB"),
        ]
        self._process: prefork.Process | subprocess.Popen[bytes] | None = None

    def restart(self) -> None:
        """Start a new process, to which the other node casts the model, and in which it serves."""
        self.stop()
        with (self._platform.data / "logs" / "other.log").open("ab") as log:
            self._process = prefork.start("invoker", *self._command, log=log)
        self._platform.until("it has joined", self._record)
        self._platform.run("scale", NAME, "--instances", "2")
        self._platform.until("it serves", lambda: self._record()["instances"])
        self._platform.until("it counts", lambda: self._record()["counters"]["cast_recv_bytes"])

    def _record(self) -> Any:
        assert self._process is not None
        pid = self._process.pid
        return next((node for node in self._platform.nodes() if node["pid"] == pid), None)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()


@contextmanager
def requests(platform: Platform) -> Iterator[list[int]]:
    """Call the function all the time; yields the statuses of the responses."""
    statuses: list[int] = []
    stop = threading.Event()

    def run() -> None:
        body = {"model": NAME, "prompt": "def f(", "max_tokens": 4}
        with platform.http() as http:
            while not stop.is_set():
                statuses.append(http.post("/v1/completions", json=body).status_code)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield statuses
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def answers_more(platform: Platform, statuses: list[int]) -> None:
    so_far = len(statuses)
    platform.until("it answers more requests", lambda: len(statuses) > so_far + 10)


def restart_second_gateway(platform: Platform) -> None:
    """Kill it; the new process reaches the nodes again."""
    process, url = platform.process("gateway-1"), RunningPlatform.of(platform.data).urls[1]
    process.kill()
    call = ("invoke", NAME, "-p", "x", "--max-tokens", "1", "--url", url)
    platform.until("it serves", lambda: not platform.run(*call, check=False).returncode)
    assert platform.process("gateway-1").pid != process.pid


async def channels(platform: Platform) -> dict[str, str]:
    async with RedisState.connect(f"unix://{platform.data}/redis.sock") as state:
        return {one.record.id: one.record.channel for one in (await state.snapshot()).nodes}


async def test_no_request_fails_while_the_secret_is_rotated(platform: Platform, tmp_path: Path) -> None:
    ours, theirs = platform.data / "cluster.secret", tmp_path / "other.secret"
    shutil.copy(ours, theirs)
    old = ours.read_bytes().strip()
    other = OtherMachine(platform, theirs)
    rotate = ("secret", "rotate", "--secret-file", str(ours))
    platform.run("deploy", str(ROOT / "functions" / "tiny-coder"), "--name", NAME)
    try:
        other.restart()
        with requests(platform) as statuses:
            platform.run(*rotate)
            answers_more(platform, statuses)
            other.restart()  # with the file as it was
            shutil.copy(ours, theirs)
            restart_second_gateway(platform)
            platform.run(*rotate, "--finish")
            answers_more(platform, statuses)
            restart_second_gateway(platform)  # the nodes run on
            shutil.copy(ours, theirs)
            other.restart()
            answers_more(platform, statuses)
        assert set(statuses) == {200}
        (new,) = ours.read_bytes().split()
        for channel in (await channels(platform)).values():  # node-0 runs since before
            await (await Channel.connect(channel, new)).aclose()
            with pytest.raises(ChannelError, match="secret"):
                await Channel.connect(channel, old)
    finally:
        other.stop()
