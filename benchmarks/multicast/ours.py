"""Our nodes as a crew: one a host of a testbed, or all on this host with shared memory."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO

from benchmarks.crew import Crew, Process, crewed
from benchmarks.multicast_peers import environment
from benchmarks.processes import Processes, module
from benchmarks.testbed import Testbed

PORT = 7000
_START_S = 60.0


def on_hosts(testbed: Testbed, nodes: int, folder: Path) -> AbstractContextManager[Crew]:
    """Nodes that reach each other over TCP. Raises CrewError."""

    def start(socket: Path, log: IO[bytes]) -> Iterator[Process]:
        for rank in range(nodes):
            listen = f"tcp://{testbed.address(rank)}:{PORT}"
            command = module("benchmarks.multicast_node", socket, rank, listen, f"host-{rank}", "-")
            yield testbed.start(rank, command, stderr=log, env=environment())

    return crewed("ours", folder, nodes, start, testbed.stop, _START_S)


def on_this_host(
    processes: Processes, nodes: int, folder: Path, images: Path
) -> AbstractContextManager[Crew]:
    """Nodes that read each other's memory, files in `images`. Raises CrewError."""

    def start(socket: Path, log: IO[bytes]) -> Iterator[Process]:
        for rank in range(nodes):
            command = module("benchmarks.multicast_node", socket, rank, "tcp://127.0.0.1:0", "this", images)
            yield processes.start(command, stderr=log, env=environment())

    return crewed("ours", folder, nodes, start, processes.stop, _START_S)
