"""A platform in a testbed: Redis, a gateway on host 0, and nodes on the others."""

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

from benchmarks.harness.owner import scratch_folder
from benchmarks.harness.processes import ROOT, module
from benchmarks.scaleout.client import Burst
from benchmarks.scaleout.modes import Mode
from benchmarks.scaleout.nodes import enter
from benchmarks.scaleout.watch import ServingMonitor, ServingSet
from benchmarks.testbed.network import Testbed
from cli.client import Client
from cli.commands.deploy import registration, send
from cli.commands.scaling import follow
from cli.errors import CliError
from cli.options import connect
from cli.supervise.logtail import tail
from cli.upload.bundle import Bundle
from invoker.emulated.profiles import find_device
from registry.config.emulation import EmulatedDevice
from registry.config.secrets import load_or_create_secret
from registry.records.change import NodeUp
from registry.redis.embedded import EmbeddedRedis
from registry.redis.state import RedisState

FUNCTION = "emulated"
PORT = 8080
_PATIENCE_S = 300.0
_PAUSE_S = 0.1
_FAST = "h800"

T = TypeVar("T")


class ScaleoutError(Exception):
    """A platform did not reach the state that the measurement needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstScenario:
    """What is equal for all modes.

    `sources`, the first nodes, hold the model in `holders` memory when the burst arrives: "host", "gpu"
    where they serve it, or "mixed", half and half. Without an emulated `device` the nodes compute on the
    processor.
    """

    device: EmulatedDevice | None
    bundle: Bundle
    nodes: int
    sources: int
    holders: str
    burst: Burst

    @property
    def slower(self) -> int:
        """The factor by which devices and links are slowed down."""
        return 1 if self.device is None else self.device.slower

    @property
    def own_copy_s(self) -> float:
        """Seconds from a node's own host memory to its accelerator; 0 on a processor."""
        return 0.0 if self.device is None else self.slower * self.bundle.image_bytes / self.host_bytes_s

    @property
    def host_bytes_s(self) -> float:
        assert self.device is not None
        _, links = find_device(self.device)
        return links.host / self.device.scale

    @property
    def serving(self) -> int:
        """How many of the sources, the first ones, serve when the burst arrives."""
        return {"host": 0, "gpu": self.sources, "mixed": self.sources // 2}[self.holders]

    def source_device(self, mode: Mode) -> str:
        """Return the device of holders; with the model on the accelerator it was loaded before."""
        return self._device(_FAST if self.holders == "gpu" else mode.source_device)

    def target_device(self, mode: Mode) -> str:
        return self._device(mode.target_device)

    def _device(self, name: str) -> str:
        if self.device is None:
            return "cpu"
        return str(EmulatedDevice(**{**asdict(self.device), "name": name}))


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstResult:
    """The answers to a burst, and what served meanwhile, in model time."""

    answers: list[dict[str, Any]]
    seen: list[ServingSet]


class TestbedPlatform:
    """The platform of one mode; a context manager.

    Nodes without the model wait `wait_s` before its first byte.
    """

    def __init__(
        self, testbed: Testbed, folder: Path, mode: Mode, scenario: BurstScenario, wait_s: float
    ) -> None:
        self._testbed = testbed
        self._folder = folder
        self._mode = mode
        self._scenario = scenario
        self._wait_s = wait_s
        self._stack = ExitStack()
        self._launcher: subprocess.Popen[str] | None = None
        self._shm = Path()
        self.url = f"http://{testbed.address(0)}:{PORT}"

    def __enter__(self) -> "TestbedPlatform":
        with ExitStack() as stack:
            self._start(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def burst(self) -> BurstResult:
        """Place the model as the mode requires, and send the burst. Raises ScaleoutError."""
        scenario, mode = self._scenario, self._mode
        self._start_nodes(range(scenario.sources), scenario.source_device(mode), 0.0)
        self._in_testbed(self._deploy)
        if scenario.sources > 1 or scenario.serving:
            self._in_testbed(self._place_image)
        self._start_nodes(range(scenario.sources, scenario.nodes), scenario.target_device(mode), self._wait_s)
        if mode.own_copies and scenario.sources < scenario.nodes:
            self._in_testbed(lambda client: _warm_nodes(client, scenario.nodes))
        with ServingMonitor(self._redis_url) as watch:
            report = self._run_client()
        seen = [one.since(report["started_s"], scenario.slower) for one in watch.seen]
        return BurstResult(answers=report["answers"], seen=seen)

    def _start(self, stack: ExitStack) -> None:
        (self._folder / "logs").mkdir(parents=True)
        self._shm = stack.enter_context(scratch_folder(Path("/dev/shm")))
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
            stack, module("benchmarks.scaleout.nodes"), "launcher", stdin=subprocess.PIPE, text=True
        )
        self._in_testbed(_wait_for_gateway)

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
        stack.callback(_stop_process, process)
        return process

    def _start_nodes(self, numbers: Sequence[int], device: str, wait_s: float) -> None:
        """Start these nodes, and wait until all started nodes have registered."""
        assert self._launcher is not None and self._launcher.stdin is not None
        for number in numbers:
            address = self._testbed.address(number + 1)
            argv = ["--redis-url", self._redis_url, "--node-id", f"n{number}", "--host-id", f"h{number}"]
            argv += ["--listen", address, "--device", device, "--shm-dir", str(self._shm), "--rdma", "off"]
            argv += ["--host-memory", f"{3 * self._scenario.bundle.image_bytes + (64 << 20)}B"]
            if self._scenario.device is None:
                argv += [
                    "--gpu-memory",
                    f"{3 * self._scenario.bundle.image_bytes + (1 << 30)}B",
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
                log = tail(self._folder / "logs" / "launcher.log")
                raise ScaleoutError(f"the node launcher has ended:\n{log}") from None
        asyncio.run(_wait_for_nodes(self._redis_url, max(numbers, default=-1) + 1))

    def _in_testbed(self, work: Callable[[Client], T]) -> T:
        """Run `work` on host 0: a thread has its own network namespace."""
        netns = self._testbed.plan.namespace(0)
        deadline_s = time.monotonic() + _PATIENCE_S
        while not (self._folder / "admin.key").exists():
            if time.monotonic() > deadline_s:
                log = self._folder / "logs" / "gateway.log"
                raise ScaleoutError(f"the gateway wrote no admin key within {_PATIENCE_S:g} s: see {log}")
            time.sleep(_PAUSE_S)
        with ThreadPoolExecutor(1, initializer=enter, initargs=(netns,)) as host:
            return host.submit(lambda: _with_client(self.url, self._key, work)).result()

    def _deploy(self, client: Client) -> None:
        scenario = self._scenario
        send(client, scenario.bundle)
        scaling = {
            "target_concurrency": -(-scenario.burst.requests // scenario.nodes),
            "keep_alive_s": 3600.0,
            "live": self._mode.live,
        }
        client.json("POST", "/admin/functions", json=registration(FUNCTION, scenario.bundle, scaling))

    def _place_image(self, client: Client) -> None:
        scenario = self._scenario
        if scenario.serving:
            body = {"instances": scenario.serving, "on": [], "wait": True}
            client.request("POST", f"/admin/functions/{FUNCTION}/scale", json=body)
        if scenario.serving < scenario.sources:
            _warm_nodes(client, scenario.sources)

    def _run_client(self) -> dict[str, Any]:
        burst = json.dumps(asdict(self._scenario.burst))
        command = module("benchmarks.scaleout.client", self.url, self._key, burst)
        done = subprocess.run(
            self._testbed.inside(0, command),
            cwd=ROOT,
            stdout=subprocess.PIPE,  # its progress goes to stderr
            text=True,
            check=False,
            start_new_session=True,
            timeout=2 * self._scenario.burst.timeout_s,
        )
        if done.returncode:
            raise ScaleoutError(f"the client ended with {done.returncode}")
        report: dict[str, Any] = json.loads(done.stdout)
        return report


def _with_client(url: str, key: str, work: Callable[[Client], T]) -> T:
    with connect(url, key) as client:
        return work(client)


def _wait_for_gateway(client: Client) -> None:
    """Wait until the gateway responds."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            client.request("GET", "/livez")
            return
        except CliError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(_PAUSE_S)


def _warm_nodes(client: Client, nodes: int) -> None:
    follow(client, f"/admin/functions/{FUNCTION}/warm", {"nodes": nodes, "on": []})


async def _wait_for_nodes(redis_url: str, count: int) -> None:
    """Wait until `count` nodes have registered."""
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


def _stop_process(process: subprocess.Popen[Any]) -> None:
    """End a process by closing its standard input, or by SIGTERM; kill it after a timeout."""
    if process.stdin is not None:
        with suppress(BrokenPipeError):
            process.stdin.close()
    else:
        process.terminate()
    try:
        process.wait(60.0)
    except subprocess.TimeoutExpired:
        print(f"{process.args!r} did not end within 60 s: killed", file=sys.stderr)
        process.kill()
        process.wait()
