"""Our nodes as a crew: one a host of a testbed, or all on this host with shared memory."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.crew import Crew
from benchmarks.multicast_peers import environment
from benchmarks.processes import Processes, module
from benchmarks.testbed import Testbed

PORT = 7000
_START_S = 60.0


@contextmanager
def on_hosts(testbed: Testbed, nodes: int, folder: Path) -> Iterator[Crew]:
    """Nodes that reach each other over TCP. Raises CrewError."""
    path = folder / "ours.socket"
    with Crew("ours", path, nodes) as crew, (folder / "ours.log").open("wb") as log:
        processes = [
            testbed.start(rank, command, stderr=log, env=environment())
            for rank, command in enumerate(commands(path, [testbed.address(rank) for rank in range(nodes)]))
        ]
        try:
            crew.gather(processes, _START_S)
            yield crew
        finally:
            crew.close()
            for process in processes:
                testbed.stop(process)


@contextmanager
def on_this_host(processes: Processes, nodes: int, folder: Path, images: Path) -> Iterator[Crew]:
    """Nodes that read each other's memory, files in `images`. Raises CrewError."""
    path = folder / "ours.socket"
    with Crew("ours", path, nodes) as crew, (folder / "ours.log").open("wb") as log:
        started: list[subprocess.Popen[Any]] = [
            processes.start(
                module("benchmarks.multicast_node", path, rank, "tcp://127.0.0.1:0", "this", images),
                stderr=log,
                env=environment(),
            )
            for rank in range(nodes)
        ]
        try:
            crew.gather(started, _START_S)
            yield crew
        finally:
            crew.close()
            for process in started:
                processes.stop(process)


def commands(socket: Path, addresses: Sequence[str]) -> list[list[str]]:
    """The commands of nodes on hosts of their own (pure)."""
    return [
        module("benchmarks.multicast_node", socket, rank, f"tcp://{address}:{PORT}", f"host-{rank}", "-")
        for rank, address in enumerate(addresses)
    ]
