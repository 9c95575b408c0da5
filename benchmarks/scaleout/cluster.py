"""A platform in a testbed: Redis, a gateway on host 0, and nodes on the others."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TypeVar

from benchmarks.harness.crew import Process, running_crew
from benchmarks.harness.forked_cluster import ForkedCluster
from benchmarks.harness.node_launcher import enter
from benchmarks.harness.owner import scratch_folder
from benchmarks.harness.processes import module
from benchmarks.scaleout.client import PROTOCOL, Burst, BurstAnswer, BurstSent
from benchmarks.scaleout.modes import Mode
from benchmarks.scaleout.watch import ServingMonitor, ServingSet
from benchmarks.testbed.network import Testbed
from cli.client import Client
from cli.commands.deploy import registration, send
from cli.commands.scaling import follow
from cli.errors import CliError
from cli.options import connect
from cli.upload.bundle import Bundle
from invoker.emulated.profiles import find_device
from registry.config.emulation import EmulatedDevice

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

    answers: list[BurstAnswer]
    seen: list[ServingSet]


class TestbedPlatform:
    """The platform of one mode; a context manager.

    Nodes without the model wait `wait_s` before its first byte.
    """

    def __init__(
        self, testbed: Testbed, folder: Path, mode: Mode, scenario: BurstScenario, wait_s: float
    ) -> None:
        self._testbed = testbed
        self._cluster = ForkedCluster(folder)
        self._mode = mode
        self._scenario = scenario
        self._wait_s = wait_s
        self._stack = ExitStack()
        self._shm = Path()
        self.url = f"http://{testbed.address(0)}:{PORT}"

    def __enter__(self) -> "TestbedPlatform":
        with self._stack as stack:
            self._start(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def burst(self) -> BurstResult:
        """Place the model as the mode requires, and send the burst. Raises ScaleoutError, CrewError."""
        scenario, mode = self._scenario, self._mode
        self._start_nodes(range(scenario.sources), scenario.source_device(mode), 0.0)
        self._in_testbed(self._deploy)
        if scenario.sources > 1 or scenario.serving:
            self._in_testbed(self._place_image)
        self._start_nodes(range(scenario.sources, scenario.nodes), scenario.target_device(mode), self._wait_s)
        if mode.own_copies and scenario.sources < scenario.nodes:
            self._in_testbed(lambda client: _warm_nodes(client, scenario.nodes))
        with ServingMonitor(self._cluster.redis.url) as watch:
            sent = self._run_client()
        seen = [one.since(sent.started_s, scenario.slower) for one in watch.seen]
        return BurstResult(answers=sent.answers, seen=seen)

    def _start(self, stack: ExitStack) -> None:
        self._shm = stack.enter_context(scratch_folder(Path("/dev/shm")))
        cluster = stack.enter_context(self._cluster)
        planner = ["--cast-planner", self._mode.planner] if self._mode.planner else []
        gateway = module(
            "gateway",
            *("--host", self._testbed.address(0), "--port", PORT, "--redis-url", cluster.redis.url),
            *("--store", cluster.folder / "store", "--data-dir", cluster.folder, *planner),
            *("--usual-link-rate", f"{self._testbed.plan.shape.rate_bit_s(0)}bit"),
        )
        cluster.start(self._testbed.inside(0, gateway), "gateway")
        self._in_testbed(_wait_for_gateway)

    @property
    def _key(self) -> str:
        return (self._cluster.folder / "admin.key").read_text().strip()

    def _start_nodes(self, numbers: Sequence[int], device: str, wait_s: float) -> None:
        """Start these nodes, and wait until they have registered. Raises CrewError."""
        image_bytes = self._scenario.bundle.image_bytes
        options = ["--device", device, "--shm-dir", self._shm, "--rdma", "off", "--spare-memory", "0B"]
        options += ["--host-memory", f"{3 * image_bytes + (64 << 20)}B"]
        if self._scenario.device is None:
            options += ["--gpu-memory", f"{3 * image_bytes + (1 << 30)}B", "--threads", "1"]
        for number in numbers:
            listen, netns = self._testbed.address(number + 1), self._testbed.plan.namespace(number + 1)
            names = f"n{number}", f"h{number}"
            self._cluster.start_node(*names, "--listen", listen, *options, netns=netns, wait_s=wait_s)
        asyncio.run(self._cluster.registered(*(f"n{number}" for number in numbers)))

    def _in_testbed(self, work: Callable[[Client], T]) -> T:
        """Run `work` on host 0: a thread has its own network namespace."""
        netns = self._testbed.plan.namespace(0)
        deadline_s = time.monotonic() + _PATIENCE_S
        while not (self._cluster.folder / "admin.key").exists():
            if time.monotonic() > deadline_s:
                log = self._cluster.folder / "logs" / "gateway.log"
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

    def _run_client(self) -> BurstSent:
        """Send the burst from host 0."""

        def start(socket: Path, log: IO[bytes]) -> list[Process]:
            client = module("benchmarks.scaleout.client", socket, 0, self.url, self._key)
            return [self._testbed.start(0, client)]  # its progress goes to stderr

        crew = ("client", self._cluster.folder / "logs", PROTOCOL, 1, start, self._testbed.stop, _PATIENCE_S)
        with running_crew(*crew) as client:
            return client.ask(self._scenario.burst, BurstSent, 2 * self._scenario.burst.timeout_s)[0]


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
