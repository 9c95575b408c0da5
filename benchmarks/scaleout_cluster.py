"""One platform in a testbed: Redis, a gateway on host 0, and emulated nodes on the others."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from benchmarks.machine import ROOT
from benchmarks.owner import own_folder
from benchmarks.processes import module
from benchmarks.scaleout_client import Burst
from benchmarks.scaleout_modes import Mode
from benchmarks.scaleout_nodes import enter
from benchmarks.testbed import Testbed
from cli.bundle import Bundle
from cli.client import Client
from cli.deploy import registration, send
from cli.errors import CliError
from cli.logtail import tail
from cli.options import connect
from cli.scaling import follow
from registry.change import NodeUp
from registry.embedded_redis import EmbeddedRedis
from registry.emulation import EmulatedDevice
from registry.redis_state import RedisState
from registry.secrets import load_or_create_secret

FUNCTION = "emulated"
PORT = 8080
_PATIENCE_S = 300.0
_PAUSE_S = 0.1

T = TypeVar("T")


class ScaleoutError(Exception):
    """A platform did not do what the measurement needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What is the same for all modes: `sources` of the nodes, the first ones, hold the model in `holders`
    memory when the burst comes."""

    device: EmulatedDevice
    bundle: Bundle
    nodes: int
    sources: int
    holders: str
    burst: Burst


class Scaleout:
    """The platform of one mode; a context manager."""

    def __init__(self, testbed: Testbed, folder: Path, mode: Mode, scene: Scene) -> None:
        self._testbed = testbed
        self._folder = folder
        self._mode = mode
        self._scene = scene
        self._stack = ExitStack()
        self._launcher: subprocess.Popen[str] | None = None
        self._shm = Path()
        self.url = f"http://{testbed.address(0)}:{PORT}"

    def __enter__(self) -> "Scaleout":
        with ExitStack() as stack:
            self._start(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def burst(self) -> list[dict[str, Any]]:
        """Bring the model where the mode has it, send the burst, and return what came of each request.
        Raises ScaleoutError."""
        scene, mode = self._scene, self._mode
        self._start_nodes(range(scene.sources), str(scene.device))
        self._in_testbed(self._deploy)
        if scene.sources > 1 or scene.holders == "gpu":
            self._in_testbed(self._hold)
        target = EmulatedDevice(**{**asdict(scene.device), "name": mode.target_device})
        self._start_nodes(range(scene.sources, scene.nodes), str(target))
        if mode.own_copies:
            self._in_testbed(lambda client: _warm(client, scene.nodes))
        return self._run_client()

    def _start(self, stack: ExitStack) -> None:
        (self._folder / "logs").mkdir(parents=True)
        self._shm = stack.enter_context(own_folder(Path("/dev/shm")))
        load_or_create_secret(self._folder / "cluster.secret")
        redis = EmbeddedRedis(self._folder)
        redis.prepare()
        self._run(stack, redis.command(), "redis-process")
        asyncio.run(redis.wait_ready(_PATIENCE_S))
        planner = ["--cast-planner", self._mode.planner] if self._mode.planner else []
        gateway = module(
            "gateway",
            *("--host", self._testbed.address(0), "--port", PORT, "--redis-url", self._redis_url),
            *("--store", self._folder / "store", "--data-dir", self._folder, *planner),
        )
        self._run(stack, self._testbed.inside(0, gateway), "gateway")
        self._launcher = self._run(
            stack, module("benchmarks.scaleout_nodes"), "launcher", stdin=subprocess.PIPE, text=True
        )
        self._in_testbed(_answers)

    @property
    def _redis_url(self) -> str:
        return f"unix://{self._folder / 'redis.sock'}"

    @property
    def _key(self) -> str:
        return (self._folder / "admin.key").read_text().strip()

    def _run(
        self, stack: ExitStack, command: Sequence[str], name: str, **options: Any
    ) -> subprocess.Popen[Any]:
        log: IO[bytes] = stack.enter_context((self._folder / "logs" / f"{name}.log").open("ab"))
        process = subprocess.Popen(
            command, cwd=ROOT, start_new_session=True, stdout=log, stderr=log, **options
        )
        stack.callback(_end, process)
        return process

    def _start_nodes(self, numbers: Sequence[int], device: str) -> None:
        """Start these nodes, and return when all that were started are there."""
        assert self._launcher is not None and self._launcher.stdin is not None
        for number in numbers:
            address = self._testbed.address(number + 1)
            argv = ["--redis-url", self._redis_url, "--node-id", f"n{number}", "--host-id", f"h{number}"]
            argv += ["--listen", address, "--device", device, "--shm-dir", str(self._shm), "--rdma", "off"]
            argv += ["--host-memory", f"{3 * self._scene.bundle.image_bytes + (64 << 20)}B"]
            argv += ["--spare-memory", "0B"]
            order = {
                "netns": self._testbed.plan.namespace(number + 1),
                "argv": argv,
                "log": str(self._folder / "logs" / f"n{number}.log"),
                "setup_s": self._mode.setup_s * self._scene.device.slower,
            }
            try:
                self._launcher.stdin.write(json.dumps(order) + "\n")
                self._launcher.stdin.flush()
            except BrokenPipeError:
                said = tail(self._folder / "logs" / "launcher.log")
                raise ScaleoutError(f"no nodes can be started:\n{said}") from None
        asyncio.run(_nodes_there(self._redis_url, max(numbers, default=-1) + 1))

    def _in_testbed(self, work: Callable[[Client], T]) -> T:
        """Run `work` on host 0: a thread has a network namespace of its own."""
        netns = self._testbed.plan.namespace(0)
        deadline_s = time.monotonic() + _PATIENCE_S
        while not (self._folder / "admin.key").exists():
            if time.monotonic() > deadline_s:
                raise ScaleoutError(f"the gateway made no key: see {self._folder / 'logs' / 'gateway.log'}")
            time.sleep(_PAUSE_S)
        with ThreadPoolExecutor(1, initializer=enter, initargs=(netns,)) as host:
            return host.submit(lambda: _with_client(self.url, self._key, work)).result()

    def _deploy(self, client: Client) -> None:
        scene = self._scene
        send(client, scene.bundle)
        scaling = {
            "target_concurrency": -(-scene.burst.requests // scene.nodes),
            "keep_alive_s": 3600.0,
            "live": self._mode.live,
        }
        client.json("POST", "/admin/functions", json=registration(FUNCTION, scene.bundle, scaling))

    def _hold(self, client: Client) -> None:
        scene = self._scene
        if scene.holders == "host":
            _warm(client, scene.sources)
            return
        body = {"instances": scene.sources, "on": [], "wait": True}
        client.request("POST", f"/admin/functions/{FUNCTION}/scale", json=body)

    def _run_client(self) -> list[dict[str, Any]]:
        told = json.dumps(asdict(self._scene.burst))
        command = module("benchmarks.scaleout_client", self.url, self._key, told)
        done = subprocess.run(
            self._testbed.inside(0, command),
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            start_new_session=True,
            timeout=2 * self._scene.burst.timeout_s,
        )
        if done.returncode:
            raise ScaleoutError(f"the client failed: {done.stderr[-2000:]}")
        answers: list[dict[str, Any]] = json.loads(done.stdout)
        return answers


def _with_client(url: str, key: str, work: Callable[[Client], T]) -> T:
    with connect(url, key) as client:
        return work(client)


def _answers(client: Client) -> None:
    """Return when the gateway does."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            client.request("GET", "/livez")
            return
        except CliError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(_PAUSE_S)


def _warm(client: Client, nodes: int) -> None:
    follow(client, f"/admin/functions/{FUNCTION}/warm", {"nodes": nodes, "on": []})


async def _nodes_there(redis_url: str, count: int) -> None:
    """Return when so many nodes have said that they are there."""
    async with RedisState.connect(redis_url) as state, asyncio.timeout(_PATIENCE_S):
        snapshot = await state.snapshot()
        there = {node.record.id for node in snapshot.nodes}
        if len(there) >= count:
            return
        async for _, change in state.watch(snapshot.cursor):
            if isinstance(change, NodeUp):
                there.add(change.record.id)
                if len(there) >= count:
                    return


def _end(process: subprocess.Popen[Any]) -> None:
    """At its standard input's end, or by SIGTERM; killed if that does not help."""
    if process.stdin is not None:
        with suppress(BrokenPipeError):
            process.stdin.close()
    else:
        process.terminate()
    try:
        process.wait(60.0)
    except subprocess.TimeoutExpired:
        print(f"{process.args!r} is killed", file=sys.stderr)
        process.kill()
        process.wait()
