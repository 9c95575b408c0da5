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
from benchmarks.scaleout_watch import Serving, ServingWatch
from benchmarks.testbed import Testbed
from cli.bundle import Bundle
from cli.client import Client
from cli.deploy import registration, send
from cli.errors import CliError
from cli.logtail import tail
from cli.options import connect
from cli.scaling import follow
from invoker.emulated.profiles import known_device
from registry.change import NodeUp
from registry.embedded_redis import EmbeddedRedis
from registry.emulation import EmulatedDevice
from registry.redis_state import RedisState
from registry.secrets import load_or_create_secret

FUNCTION = "emulated"
PORT = 8080
_PATIENCE_S = 300.0
_PAUSE_S = 0.1
_FAST = "h800"

T = TypeVar("T")


class ScaleoutError(Exception):
    """A platform did not do what the measurement needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What is the same for all modes: `sources` of the nodes, the first ones, hold the model in `holders`
    memory when the burst comes: "host", "gpu" where they serve it, or "mixed", half and half. Without a
    `device` that is emulated the nodes compute on the processor."""

    device: EmulatedDevice | None
    bundle: Bundle
    nodes: int
    sources: int
    holders: str
    burst: Burst

    @property
    def slower(self) -> int:
        """Times that its devices and links are."""
        return 1 if self.device is None else self.device.slower

    @property
    def own_copy_s(self) -> float:
        """From a node's own host memory to its accelerator; next to nothing on a processor."""
        return 0.0 if self.device is None else self.slower * self.bundle.image_bytes / self.host_bytes_s

    @property
    def host_bytes_s(self) -> float:
        assert self.device is not None
        _, links = known_device(self.device)
        return links.host / self.device.scale

    @property
    def serving(self) -> int:
        """How many of the sources, the first ones, serve when the burst comes."""
        return {"host": 0, "gpu": self.sources, "mixed": self.sources // 2}[self.holders]

    def source_device(self, mode: Mode) -> str:
        """What a holder computes on; where it has the model on its accelerator, it came there before."""
        return self._device(_FAST if self.holders == "gpu" else mode.source_device)

    def target_device(self, mode: Mode) -> str:
        return self._device(mode.target_device)

    def _device(self, name: str) -> str:
        if self.device is None:
            return "cpu"
        return str(EmulatedDevice(**{**asdict(self.device), "name": name}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Came:
    """What came of each request of a burst, and who served meanwhile, in the model's time."""

    answers: list[dict[str, Any]]
    seen: list[Serving]


class Scaleout:
    """The platform of one mode; a context manager. Nodes that do not hold the model wait `wait_s` before it
    comes."""

    def __init__(self, testbed: Testbed, folder: Path, mode: Mode, scene: Scene, wait_s: float) -> None:
        self._testbed = testbed
        self._folder = folder
        self._mode = mode
        self._scene = scene
        self._wait_s = wait_s
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

    def burst(self) -> Came:
        """Bring the model where the mode has it, and send the burst. Raises ScaleoutError."""
        scene, mode = self._scene, self._mode
        self._start_nodes(range(scene.sources), scene.source_device(mode), 0.0)
        self._in_testbed(self._deploy)
        if scene.sources > 1 or scene.serving:
            self._in_testbed(self._hold)
        self._start_nodes(range(scene.sources, scene.nodes), scene.target_device(mode), self._wait_s)
        if mode.own_copies and scene.sources < scene.nodes:
            self._in_testbed(lambda client: _warm(client, scene.nodes))
        with ServingWatch(self._redis_url) as watch:
            told = self._run_client()
        seen = [one.since(told["began_s"], scene.slower) for one in watch.seen]
        return Came(answers=told["answers"], seen=seen)

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
            *("--usual-link-rate", f"{self._testbed.plan.shape.rate_bit_s(0)}bit"),
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

    def _start_nodes(self, numbers: Sequence[int], device: str, wait_s: float) -> None:
        """Start these nodes, and return when all that were started are there."""
        assert self._launcher is not None and self._launcher.stdin is not None
        for number in numbers:
            address = self._testbed.address(number + 1)
            argv = ["--redis-url", self._redis_url, "--node-id", f"n{number}", "--host-id", f"h{number}"]
            argv += ["--listen", address, "--device", device, "--shm-dir", str(self._shm), "--rdma", "off"]
            argv += ["--host-memory", f"{3 * self._scene.bundle.image_bytes + (64 << 20)}B"]
            if self._scene.device is None:
                argv += [
                    "--gpu-memory",
                    f"{3 * self._scene.bundle.image_bytes + (1 << 30)}B",
                    "--threads",
                    "1",
                ]
            argv += ["--spare-memory", "0B"]
            order = {
                "netns": self._testbed.plan.namespace(number + 1),
                "argv": argv,
                "log": str(self._folder / "logs" / f"n{number}.log"),
                "wait_s": wait_s,
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
        if scene.serving:
            body = {"instances": scene.serving, "on": [], "wait": True}
            client.request("POST", f"/admin/functions/{FUNCTION}/scale", json=body)
        if scene.serving < scene.sources:
            _warm(client, scene.sources)

    def _run_client(self) -> dict[str, Any]:
        told = json.dumps(asdict(self._scene.burst))
        command = module("benchmarks.scaleout_client", self.url, self._key, told)
        done = subprocess.run(
            self._testbed.inside(0, command),
            cwd=ROOT,
            stdout=subprocess.PIPE,  # what it prints beside its answer is for who watches
            text=True,
            check=False,
            start_new_session=True,
            timeout=2 * self._scene.burst.timeout_s,
        )
        if done.returncode:
            raise ScaleoutError(f"the client ended with {done.returncode}")
        came: dict[str, Any] = json.loads(done.stdout)
        return came


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
