"""Gateways and nodes of an earlier release are replaced one by one under load, in both orders."""

import asyncio
import itertools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from benchmarks.chaos.load import (
    ECHO,
    MODEL,
    IssuedRequest,
    RequestFate,
    RequestTemplate,
    TenantClient,
    request_templates,
)
from benchmarks.harness.local_platform import free_port
from benchmarks.harness.processes import ROOT
from tests.fixtures.patience import PATIENCE_S, until_seen
from tests.fixtures.plain_redis import PlainRedis

# The last commit at which leases had no incarnation and records no schema.
EARLIER = "ab5022d"
CLIENTS = 6
ENOUGH = 20  # requests that succeed after each replacement
LIMIT_S = 60.0
SCALING = ("--min-instances", "1")


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack the files of the earlier release."""
    folder = tmp_path_factory.mktemp("earlier")
    packed = subprocess.run(["git", "-C", ROOT, "archive", EARLIER], capture_output=True, check=False)
    if packed.returncode:
        pytest.skip(f"commit {EARLIER} is not here: {packed.stderr.decode().strip()}")
    subprocess.run(["tar", "-x", "-C", folder], input=packed.stdout, check=True)
    return folder


@dataclass
class Process:
    """One gateway or node of one release."""

    name: str
    child: subprocess.Popen[bytes]
    url: str = ""  # of a gateway


@dataclass
class Cluster:
    """Gateways and nodes over a Redis, each started from the tree of its release."""

    folder: Path
    redis: PlainRedis
    running: dict[str, Process] = field(default_factory=dict)
    serving: list[str] = field(default_factory=list)  # gateways' URLs which clients use
    numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def secret(self) -> Path:
        return self.folder / "data" / "cluster.secret"

    @property
    def admin_key(self) -> str:
        return (self.folder / "data" / "admin.key").read_text().strip()

    def _start(self, tree: Path, name: str, *arguments: object) -> Process:
        command = [sys.executable, "-m", "cli", *map(str, arguments), "--redis-url", self.redis.url]
        env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        with (self.folder / f"{name}.log").open("ab") as log:
            child = subprocess.Popen(command, cwd=tree, env=env, stdout=log, stderr=log)
        self.running[name] = made = Process(name, child)
        return made

    async def start_gateway(self, tree: Path, role: str) -> Process:
        port = free_port()
        name = f"{role}-{next(self.numbers)}"
        made = self._start(
            tree,
            name,
            *("gateway", "--port", port, "--store", self.folder / "store"),
            *("--data-dir", self.folder / "data", "--gateway-id", name),
        )
        made.url = f"http://127.0.0.1:{port}"
        await self.until(made, lambda: status(f"{made.url}/livez") == 200)
        return made

    async def start_node(self, tree: Path, role: str) -> Process:
        name = f"{role}-{next(self.numbers)}"
        made = self._start(
            tree,
            name,
            *("invoker", "--device", "cpu", "--node-id", name, "--host-id", name, "--nodes-hint", 2),
            *("--secret-file", self.secret, "--host-memory", "1GiB", "--gpu-memory", "1GiB"),
            *("--shm-dir", self.folder / "shm", "--meter-interval", "500ms"),
        )
        await self.until(made, lambda: name in self.nodes())
        return made

    def nodes(self) -> list[str]:
        """Return the nodes that are in the state."""
        answer = self.get("/admin/nodes")
        return [] if answer is None else [one["id"] for one in answer["nodes"]]

    def get(self, path: str) -> Any:
        for url in self.serving:
            try:
                answer = httpx2.get(
                    url + path,
                    headers={"authorization": f"Bearer {self.admin_key}"},
                    timeout=PATIENCE_S,
                    trust_env=False,
                )
            except httpx2.TransportError:
                continue
            if answer.status_code == 200:
                return answer.json()
        return None

    async def until(self, process: Process, holds: Callable[[], bool]) -> None:
        def look() -> bool:
            assert process.child.poll() is None, self.logs()
            return holds()

        await asyncio.to_thread(until_seen, f"{process.name} does so", look, failing=self.logs)

    async def stop(self, process: Process) -> None:
        """Terminate as an orchestrator would, and wait for the end."""
        process.child.terminate()
        code = await asyncio.to_thread(process.child.wait, PATIENCE_S)
        del self.running[process.name]
        assert code == 0, f"{process.name} ended with {code}\n{self.logs()}"

    def command(self, tree: Path, *arguments: str) -> str:
        env = {**os.environ, "PYTHONPATH": str(tree), "HYPERCAST_URL": self.serving[0]}
        env["HYPERCAST_API_KEY"] = self.admin_key
        done = subprocess.run(
            [sys.executable, "-m", "cli", *arguments], cwd=tree, env=env, capture_output=True, text=True
        )
        assert not done.returncode, f"{arguments}: {done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout

    def logs(self) -> str:
        paths = sorted(self.folder.glob("*.log"))
        ends = {one.name: one.read_text(errors="replace").splitlines()[-25:] for one in paths}
        return "\n".join("\n".join([f"--- {name}", *lines]) for name, lines in ends.items())

    def close(self) -> None:
        for one in self.running.values():
            one.child.kill()
            one.child.wait()


def status(url: str) -> int:
    try:
        return httpx2.get(url, timeout=PATIENCE_S, trust_env=False).status_code
    except httpx2.TransportError:
        return 0


@dataclass
class Load:
    """Clients which send one request after another to the gateways that serve."""

    cluster: Cluster
    works: Sequence[RequestTemplate]
    issued: list[IssuedRequest] = field(default_factory=list)
    under_way: Counter[str] = field(default_factory=Counter)  # by URL
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    over: bool = False

    def failed(self) -> str:
        """Return what failed, and the logs then."""
        failed = [str(one) for one in self.issued if one.fate is not RequestFate.ACKNOWLEDGED]
        return "\n".join([*failed[:20], self.cluster.logs()]) if failed else ""

    async def run_client(self, number: int) -> None:
        for turn in itertools.count():
            if self.over:
                return
            url = self.cluster.serving[(number + turn) % len(self.cluster.serving)]
            client = TenantClient(0, url, "acme", self.cluster.admin_key)
            work = self.works[(number + turn) % len(self.works)]
            self.under_way[url] += 1
            issued, _ = await client.ask(f"load-{number}-{turn}", work, LIMIT_S)
            self.under_way[url] -= 1
            self.issued.append(issued)
            self.answered.set()
            if issued.fate is not RequestFate.ACKNOWLEDGED:
                return

    async def take_out(self, old: Process, new: Process) -> None:
        """Send no more to the old gateway, as a load balancer does before it is terminated."""
        self.cluster.serving = [new.url if url == old.url else url for url in self.cluster.serving]
        async with asyncio.timeout(PATIENCE_S):
            while self.under_way[old.url] and not self.failed():
                self.answered.clear()
                await self.answered.wait()

    async def some_more(self) -> None:
        """Wait until more requests have been answered, none of them with a failure."""
        wanted = len(self.issued) + ENOUGH
        async with asyncio.timeout(PATIENCE_S):
            while len(self.issued) < wanted and not self.failed():
                self.answered.clear()
                await self.answered.wait()
        assert not self.failed(), self.failed()


@asynccontextmanager
async def load_on(cluster: Cluster) -> AsyncIterator[Load]:
    works = [one for one in request_templates(24) if one.name in ("greedy", "whole", "echo")]
    load = Load(cluster, works)
    tasks = [asyncio.create_task(load.run_client(number)) for number in range(CLIENTS)]
    try:
        yield load
        load.over = True
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


@pytest.mark.soak
@pytest.mark.parametrize("first", ["gateways", "nodes"])
async def test_an_upgrade_one_by_one_fails_no_request(first: str, earlier: Path, tmp_path: Path) -> None:
    with PlainRedis(tmp_path / "redis") as redis:
        cluster = Cluster(tmp_path, redis)
        try:
            await upgrade(cluster, earlier, first)
        finally:
            cluster.close()


async def upgrade(cluster: Cluster, earlier: Path, first: str) -> None:
    gateways = [await cluster.start_gateway(earlier, "gateway") for _ in range(2)]
    cluster.serving = [one.url for one in gateways]
    nodes = [await cluster.start_node(earlier, "node") for _ in range(2)]
    coder = str(earlier / "functions" / "tiny-coder")
    await asyncio.to_thread(cluster.command, earlier, "deploy", coder, "--name", MODEL, *SCALING)
    await asyncio.to_thread(cluster.command, earlier, "deploy", "builtin:echo", "--name", ECHO, *SCALING)
    async with load_on(cluster) as load:
        await load.some_more()
        replaced = {"gateways": gateways, "nodes": nodes}
        for kind in sorted(replaced, key=lambda kind: kind != first):
            for one in replaced[kind]:
                await (replace_gateway if kind == "gateways" else replace_node)(load, one)
                await load.some_more()
                # A function of which no instance runs: the releases start one together.
                name = f"after-{one.name}"
                await asyncio.to_thread(cluster.command, ROOT, "deploy", "builtin:echo", "--name", name)
                await asyncio.to_thread(cluster.command, ROOT, "invoke", name, "--data", "{}")
    assert not load.failed(), load.failed()
    # A difference ends the command with 1.
    await asyncio.to_thread(cluster.command, ROOT, "usage", "check", "--wait", "20s")


async def replace_gateway(load: Load, old: Process) -> None:
    new = await load.cluster.start_gateway(ROOT, "gateway")
    await load.cluster.until(new, lambda: status(f"{new.url}/readyz") == 200)
    await load.take_out(old, new)
    await load.cluster.stop(old)


async def replace_node(load: Load, old: Process) -> None:
    await load.cluster.start_node(ROOT, "node")
    await load.cluster.stop(old)
