"""The crews of the peers that ours is measured beside: gloo, Open MPI, NIXL; one rank a host."""

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO

from benchmarks.crew import Crew, Process, crewed
from benchmarks.machine import ROOT
from benchmarks.multicast_run import Contender
from benchmarks.processes import module
from benchmarks.testbed import Testbed
from benchmarks.testbed_plan import INTERFACE, TestbedPlan

PEERS = ("gloo", "mpi", "nixl")
GLOO_PORT = 29500
# Of Open MPI 4's coll_tuned_bcast_algorithm; what each does is in `mpi_algorithm`.
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


def why_not(peer: str) -> str:
    """Why a peer cannot be measured here; "" if it can."""
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
def gloo(testbed: Testbed, nodes: int, folder: Path) -> Iterator[Contender]:
    """Ranks of `torch.distributed`. Raises CrewError."""
    with _ranks("gloo", testbed, nodes, folder, nodes, testbed.address(0), GLOO_PORT) as crew:
        yield Contender("gloo", crew, nodes)


@contextmanager
def nixl(testbed: Testbed, nodes: int, folder: Path) -> Iterator[Contender]:
    """Agents of NIXL. Raises CrewError."""
    with _ranks("nixl", testbed, nodes, folder, nodes, folder) as crew:
        yield Contender("nixl", crew, nodes, algorithm="every target reads from the source")


def _ranks(
    peer: str, testbed: Testbed, nodes: int, folder: Path, *arguments: object
) -> AbstractContextManager[Crew]:
    """A process of `benchmarks.<peer>_node` a host."""

    def start(socket: Path, log: IO[bytes]) -> Iterator[Process]:
        for rank in range(nodes):
            command = module(f"benchmarks.{peer}_node", socket, rank, *arguments)
            yield testbed.start(rank, command, stdout=log, stderr=log, env=environment())

    return crewed(peer, folder, nodes, start, testbed.stop, _START_S)


@contextmanager
def mpi(testbed: Testbed, nodes: int, folder: Path, algorithm: str) -> Iterator[Contender]:
    """Ranks of Open MPI, all with one algorithm. Raises CrewError."""
    agent = folder / "mpi-agent"
    agent.write_text(agent_script(testbed.plan))
    agent.chmod(0o755)

    def start(socket: Path, log: IO[bytes]) -> Iterator[Process]:
        command = mpirun(testbed.plan, nodes, agent, algorithm, socket)
        yield testbed.start(0, command, stdout=log, stderr=log, env=environment())

    with crewed(f"mpi-{algorithm}", folder, nodes, start, testbed.stop, _START_S) as crew:
        yield Contender("mpi", crew, nodes, algorithm=mpi_algorithm(algorithm))


def mpirun(plan: TestbedPlan, nodes: int, agent: Path, algorithm: str, socket: Path) -> list[str]:
    """The command that starts a rank on each of the first hosts (pure)."""
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
    return ["mpirun", "--allow-run-as-root", *ranks, *chosen, *module("benchmarks.mpi_node", socket)]


def agent_script(plan: TestbedPlan) -> str:
    """What mpirun calls in the place of ssh: the host's address, then the command."""
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
    """One thread a rank: the hosts share this machine's processors."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
