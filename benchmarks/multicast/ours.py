"""Our nodes as a crew: one per testbed host, or all on this host with shared memory."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO

from benchmarks.harness.crew import Crew, Process, running_crew
from benchmarks.harness.processes import Processes, module
from benchmarks.multicast.messages import PROTOCOL
from benchmarks.multicast.peers import environment
from benchmarks.testbed.network import Testbed

PORT = 7000
_START_S = 60.0


def on_hosts(testbed: Testbed, nodes: int, folder: Path) -> AbstractContextManager[Crew]:
    """Start nodes that reach each other over TCP. Raises CrewError."""

    def start(socket: Path, log: IO[bytes]) -> Iterator[Process]:
        for rank in range(nodes):
            listen = f"tcp://{testbed.address(rank)}:{PORT}"
            command = module("benchmarks.multicast.node", socket, rank, listen, f"host-{rank}", "-")
            yield testbed.start(rank, command, stderr=log, env=environment())

    return running_crew("ours", folder, PROTOCOL, nodes, start, testbed.stop, _START_S)


def on_this_host(
    processes: Processes, nodes: int, folder: Path, images: Path
) -> AbstractContextManager[Crew]:
    """Start nodes that read each other's memory, from files in `images`. Raises CrewError."""

    def start(socket: Path, log: IO[bytes]) -> Iterator[Process]:
        for rank in range(nodes):
            command = module("benchmarks.multicast.node", socket, rank, "tcp://127.0.0.1:0", "this", images)
            yield processes.start(command, stderr=log, env=environment())

    return running_crew("ours", folder, PROTOCOL, nodes, start, processes.stop, _START_S)
