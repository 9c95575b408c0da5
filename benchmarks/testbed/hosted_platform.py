"""A platform in a testbed: Redis, a gateway on host 0, and nodes on the others."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, Self, TypeVar

from benchmarks.harness.arguments import UNLIMITED
from benchmarks.harness.crew import Process, running_crew
from benchmarks.harness.crew_messages import CrewMessage, CrewProtocol
from benchmarks.harness.forked_cluster import ForkedCluster
from benchmarks.harness.node_launcher import enter
from benchmarks.harness.owner import scratch_folder
from benchmarks.harness.processes import module
from benchmarks.testbed.link_meter import LinkMeter
from benchmarks.testbed.network import Testbed
from cli.client import Client
from cli.commands.scaling import follow
from cli.errors import CliError
from cli.options import connect

PORT = 8080
_PATIENCE_S = 300.0
_PAUSE_S = 0.1

T = TypeVar("T")
R = TypeVar("R", bound=CrewMessage)


class PlatformError(Exception):
    """A platform did not reach the state that the measurement needs."""


class TestbedPlatform:
    """A platform, at first without nodes; a context manager.

    `planner` is that of all casts, "" for any. With `served_copies` hosts keep copies of what their
    accelerators serve. Without `moves_on_drain` calls of an instance that is to stop end there.
    """

    def __init__(
        self,
        testbed: Testbed,
        folder: Path,
        planner: str = "",
        *,
        served_copies: bool = False,
        moves_on_drain: bool = True,
    ) -> None:
        self._testbed = testbed
        self._gateway_flags = ["--cast-planner", planner] if planner else []
        if served_copies:
            self._gateway_flags += ["--served-copies", UNLIMITED]
        if not moves_on_drain:
            self._gateway_flags += ["--drain-calls", "finish"]
        self._stack = ExitStack()
        self._shm = Path()
        self.cluster = ForkedCluster(folder)
        self.url = f"http://{testbed.address(0)}:{PORT}"

    def __enter__(self) -> Self:
        with self._stack as stack:
            self._start(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def key(self) -> str:
        return (self.cluster.folder / "admin.key").read_text().strip()

    @property
    def store(self) -> Path:
        return self.cluster.folder / "store"

    def start_nodes(self, numbers: Sequence[int], host_bytes: int, *options: object, **how: Any) -> None:
        """Start these nodes with that much host memory, and wait until they have registered.

        `how` is as in StartNode. Raises CrewError.
        """
        common = ("--shm-dir", self._shm, "--rdma", "off", "--spare-memory", "0B")
        memory = ("--host-memory", f"{host_bytes}B")
        for number in numbers:
            address = "--listen", self._testbed.address(number + 1)
            netns = self._testbed.plan.namespace(number + 1)
            argv = (*address, *common, *memory, *options)
            self.cluster.start_node(f"n{number}", f"h{number}", *argv, netns=netns, **how)
        asyncio.run(self.cluster.registered(*(f"n{number}" for number in numbers)))

    def in_testbed(self, work: Callable[[Client], T]) -> T:
        """Run `work` on host 0: a thread has its own network namespace."""
        netns = self._testbed.plan.namespace(0)
        deadline_s = time.monotonic() + _PATIENCE_S
        while not (self.cluster.folder / "admin.key").exists():
            if time.monotonic() > deadline_s:
                log = self.cluster.folder / "logs" / "gateway.log"
                raise PlatformError(f"the gateway wrote no admin key within {_PATIENCE_S:g} s: see {log}")
            time.sleep(_PAUSE_S)
        with ThreadPoolExecutor(1, initializer=enter, initargs=(netns,)) as host:
            return host.submit(lambda: _with_client(self.url, self.key, work)).result()

    def link_meter(self) -> LinkMeter:
        """Return a meter of all links; the gateway's host is 0."""
        return LinkMeter(self._testbed.plan)

    def ask_client(
        self, name: str, protocol: CrewProtocol, order: CrewMessage, reply: type[R], patience_s: float
    ) -> R:
        """Run the module `name` on host 0 with URL and key, and return its reply. Raises CrewError."""

        def start(socket: Path, log: IO[bytes]) -> list[Process]:
            client = module(name, socket, 0, self.url, self.key)
            return [self._testbed.start(0, client)]  # its progress goes to stderr

        crew = ("client", self.cluster.folder / "logs", protocol, 1, start, self._testbed.stop, _PATIENCE_S)
        with running_crew(*crew) as client:
            return client.ask(order, reply, patience_s)[0]

    def _start(self, stack: ExitStack) -> None:
        self._shm = stack.enter_context(scratch_folder(Path("/dev/shm")))
        cluster = stack.enter_context(self.cluster)
        gateway = module(
            "gateway",
            *("--host", self._testbed.address(0), "--port", PORT, "--redis-url", cluster.redis.url),
            *("--store", self.store, "--data-dir", cluster.folder, *self._gateway_flags),
            *("--usual-link-rate", f"{self._testbed.plan.shape.rate_bit_s(0)}bit"),
        )
        cluster.start(self._testbed.inside(0, gateway), "gateway")
        self.in_testbed(_wait_for_gateway)


def warm_nodes(client: Client, function: str, nodes: int) -> None:
    """Have this many nodes hold the function's model in host memory."""
    follow(client, f"/admin/functions/{function}/warm", {"nodes": nodes, "on": []})


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
