"""The crews of the peers that ours is compared with: gloo, Open MPI and NIXL, one rank per host."""

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO

from benchmarks.harness.crew import Crew, Process, running_crew
from benchmarks.harness.processes import ROOT, module
from benchmarks.multicast.messages import PROTOCOL
from benchmarks.multicast.run import MulticastContender
from benchmarks.testbed.network import Testbed
from benchmarks.testbed.plan import INTERFACE, TestbedPlan

PEERS = ("gloo", "mpi", "nixl")
GLOO_PORT = 29500
# Values of Open MPI 4's coll_tuned_bcast_algorithm; names in _MPI_NAMES.
MPI_ALGORITHMS = ("9", "8", "3", "5", "2")
_MPI_NAMES = {
    "9": "scatter + ring allgather",
    "8": "scatter + recursive doubling",
    "6": "binomial tree",
    "5": "binary tree",
    "3": "pipeline",
    "2": "chain",
}
SEGMENT_BYTES = 256 << 10
_START_S = 120.0


def unavailable_reason(peer: str) -> str:
    """Return why a peer cannot be measured here, or ""."""
    if peer == "gloo" and importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    if peer == "nixl" and importlib.util.find_spec("nixl") is None:
        return "nixl is not installed (pip install nixl nixl-cu12)"
    if peer == "mpi" and shutil.which("mpirun") is None:
        return "mpirun not found: install Open MPI (apt-get install openmpi-bin)"
    return ""


def mpi_algorithm(number: str) -> str:
    return f"{number}: {_MPI_NAMES.get(number, 'unknown')}"


@contextmanager
def gloo(testbed: Testbed, nodes: int, folder: Path) -> Iterator[MulticastContender]:
    """Start ranks of `torch.distributed`. Raises CrewError."""
    with _ranks("gloo", testbed, nodes, folder, nodes, testbed.address(0), GLOO_PORT) as crew:
        yield MulticastContender("gloo", crew, nodes)


@contextmanager
def nixl(testbed: Testbed, nodes: int, folder: Path) -> Iterator[MulticastContender]:
    """Start NIXL agents. Raises CrewError."""
    with _ranks("nixl", testbed, nodes, folder, nodes, folder) as crew:
        yield MulticastContender("nixl", crew, nodes, algorithm="every target reads from the source")


def _ranks(
    peer: str, testbed: Testbed, nodes: int, folder: Path, *arguments: object
) -> AbstractContextManager[Crew]:
    """Start a process of `benchmarks.multicast.<peer>_node` per host."""

    def start(socket: Path, log: IO[bytes]) -> Iterator[Process]:
        for rank in range(nodes):
            command = module(f"benchmarks.multicast.{peer}_node", socket, rank, *arguments)
            yield testbed.start(rank, command, stdout=log, stderr=log, env=environment())

    return running_crew(peer, folder, PROTOCOL, nodes, start, testbed.stop, _START_S)


@contextmanager
def mpi(testbed: Testbed, nodes: int, folder: Path, algorithm: str) -> Iterator[MulticastContender]:
    """Start ranks of Open MPI with one algorithm. Raises CrewError."""
    agent = folder / "mpi-agent"
    agent.write_text(agent_script(testbed.plan))
    agent.chmod(0o755)

    def start(socket: Path, log: IO[bytes]) -> Iterator[Process]:
        command = mpirun(testbed.plan, nodes, agent, algorithm, socket)
        yield testbed.start(0, command, stdout=log, stderr=log, env=environment())

    with running_crew(f"mpi-{algorithm}", folder, PROTOCOL, nodes, start, testbed.stop, _START_S) as crew:
        yield MulticastContender("mpi", crew, nodes, algorithm=mpi_algorithm(algorithm))


def mpirun(plan: TestbedPlan, nodes: int, agent: Path, algorithm: str, socket: Path) -> list[str]:
    """Return the command that starts a rank on each of the first hosts (pure)."""
    options = {
        "plm_rsh_agent": str(agent),
        "btl": "tcp,self",
        "btl_tcp_if_include": INTERFACE,
        "oob_tcp_if_include": INTERFACE,
        "coll_tuned_use_dynamic_rules": "1",
        "coll_tuned_bcast_algorithm": algorithm,
        "coll_tuned_bcast_algorithm_segmentsize": str(SEGMENT_BYTES),
    }
    chosen = [word for name, value in options.items() for word in ("--mca", name, value)]
    hosts = ",".join(f"{plan.address(host)}:1" for host in range(nodes))
    ranks = ["-np", str(nodes), "--host", hosts, "--map-by", "node", "--bind-to", "none"]
    return [
        "mpirun",
        "--allow-run-as-root",
        *ranks,
        *chosen,
        *module("benchmarks.multicast.mpi_node", socket),
    ]


def agent_script(plan: TestbedPlan) -> str:
    """Return the script that mpirun calls instead of ssh, with the host's address and the command."""
    cases = [f"{plan.address(host)}) namespace={plan.namespace(host)} ;;" for host in range(plan.hosts)]
    return "\n".join(
        [
            "#!/bin/sh",
            'host="$1"; shift',
            'case "$host" in',
            *cases,
            '*) echo "no host $host" >&2; exit 1 ;;',
            "esac",
            f'cd {ROOT} && exec ip netns exec "$namespace" sh -c "$*"',
            "",
        ]
    )


def environment() -> dict[str, str]:
    """Return the environment of ranks: one thread each, because the hosts share this machine's processors."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
