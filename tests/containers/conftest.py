"""The image, built once, and the compose project that runs it."""

import os
import re
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import pytest
import yaml

from benchmarks.harness.local_platform import free_port
from tests.containers.podman import (
    IMAGE,
    PYTHON,
    ROOT,
    Compose,
    Failed,
    Podman,
    make_podman,
    missing,
    pinned_bridges,
    provide_bases,
)
from tests.fixtures.patience import until_seen

PROFILES = ("cpu", "replica")
GATEWAYS = ("gateway", "gateway-1")
NODES = ("invoker-cpu-0", "invoker-cpu-1")
HOST_TIER_BYTES = 512 << 20


def note(what: str, value: str) -> None:
    """Print a measured value."""
    print(f"  {what}: {value}", flush=True)


@pytest.fixture(scope="session")
def podman() -> Iterator[Podman]:
    if os.geteuid() or missing():
        pytest.skip("needs root and podman: make test-containers says what is missing")
    made = make_podman()
    begin_s = time.monotonic()
    provide_bases(made)
    note("base images", f"{time.monotonic() - begin_s:.0f} s")
    with pinned_bridges():
        yield made


@pytest.fixture(scope="session")
def image(podman: Podman) -> str:
    """Build the image from the Dockerfile."""
    took_s = podman.build(ROOT, "--tag", f"localhost/{IMAGE}", "--build-arg", "EXTRAS=")
    own, base = (podman.inspect(name, "image")["Size"] for name in (IMAGE, PYTHON))
    note("build", f"{took_s:.0f} s (layers of an earlier build count)")
    note("image", f"{own / 1e6:.0f} MB, of which {base / 1e6:.0f} MB are the base")
    return IMAGE


@dataclass(frozen=True, slots=True)
class Cluster:
    """The running compose project."""

    compose: Compose
    ports: tuple[int, int]
    replaced: list[str] = field(default_factory=list)  # the last lines of containers that were removed

    @property
    def urls(self) -> list[str]:
        """The gateways, as the machine reaches them."""
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    @property
    def key(self) -> str:
        return self.compose.exec("gateway", "cat", "/var/lib/hypercast/data/admin.key").strip()

    def hypercast(self, *arguments: object) -> str:
        """Run the command of the image in the gateway's container."""
        settings = (f"--env=HYPERCAST_API_KEY={self.key}", "--env=HYPERCAST_URL=http://127.0.0.1:8080")
        return self.compose.podman.run(
            "exec", *settings, self.compose.name("gateway"), "hypercast", *arguments
        )

    def ready_nodes(self) -> set[str]:
        """Return the nodes in the cluster's state, from the first gateway that answers."""
        for url in self.urls:
            try:
                answer = httpx2.get(
                    f"{url}/admin/nodes",
                    headers={"authorization": f"Bearer {self.key}"},
                    timeout=5.0,
                    trust_env=False,
                )
            except (httpx2.TransportError, Failed):
                continue
            if answer.status_code == 200:
                return {one["id"] for one in answer.json()["nodes"] if one["state"] == "ready"}
        return set()

    def is_ready(self, service: str) -> bool:
        """Return whether the service's own health check passes."""
        try:
            name = self.compose.name(service)
        except Failed:
            return False
        return self.compose.podman.attempt("healthcheck", "run", name).returncode == 0

    def until_ready(self, *services: str) -> None:
        for service in services:
            until_seen(f"{service} is healthy", lambda one=service: self.is_ready(one), failing=self.logs)

    def logs(self) -> str:
        """Return the last lines of every container, first of those that were replaced."""
        return "\n".join([*self.replaced, *map(self.last_lines, ("redis", *GATEWAYS, *NODES))])

    def last_lines(self, service: str) -> str:
        """Return the last lines which a service's container wrote."""
        try:
            done = self.compose.podman.attempt("logs", "--tail", "60", self.compose.name(service))
        except Failed as error:
            return f"--- {service}: {error}"
        return f"--- {service}\n{done.stdout}{done.stderr}"


def may_raise_limits() -> bool:
    """Return whether this process has CAP_SYS_RESOURCE: without it containers have no higher limits."""
    effective = re.search(r"^CapEff:\s*(\w+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return effective is not None and bool(int(effective[1], 16) >> 24 & 1)


def locked_limit() -> int:
    """Return what the compose file's memlock becomes here, in bytes; -1 is unlimited."""
    return -1 if may_raise_limits() else resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]


def write_override(folder: Path) -> None:
    """Write what this machine and podman 4 need beside the compose file.

    A service's limits replace podman's defaults, and may be no higher than this machine's. For the size of a
    tmpfs podman 4 has no option (it takes `size` for a quota), but the kernel counts pages as well.
    """
    nofile = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 1 << 16)
    limits = {"ulimits": {"memlock": locked_limit(), "nofile": nofile, "nproc": 4096}}
    pages = HOST_TIER_BYTES // resource.getpagesize()
    options = {"o": f"nr_blocks={pages},uid=10001,gid=10001,mode=0700"}
    override = {
        "services": dict.fromkeys(NODES, limits),
        "volumes": {"host-tier": {"driver_opts": options}},
    }
    (folder / "docker-compose.override.yml").write_text(yaml.safe_dump(override))


def write_secrets(folder: Path) -> None:
    """Run the commands of the compose file's header, which make the secrets."""
    header = (folder / "docker-compose.yml").read_text().partition("\nname:")[0]
    lines = [line.removeprefix("#").strip() for line in header.splitlines()]
    commands = [line for line in lines if "secrets" in line and line.startswith(("mkdir", "for", "sudo"))]
    script = 'sudo() { "$@"; }\n' + "\n".join(commands)
    subprocess.run(["sh", "-euc", script], cwd=folder, check=True)


@pytest.fixture(scope="session")
def cluster(podman: Podman, image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Bring up the compose file with its profiles cpu and replica, and wait until everything is healthy."""
    folder = tmp_path_factory.mktemp("compose")
    folder.chmod(0o711)
    shutil.copy(ROOT / "docker-compose.yml", folder)
    shutil.copytree(ROOT / "deploy" / "redis", folder / "deploy" / "redis")
    write_secrets(folder)
    write_override(folder)
    ports = free_port(), free_port()
    values = {
        "HYPERCAST_PORT": str(ports[0]),
        "HYPERCAST_PORT_1": str(ports[1]),
        "HYPERCAST_CPU_ARENA": "512MiB",
        "HYPERCAST_CPU_LIMIT": "3g",
        "HYPERCAST_GATEWAY_LIMIT": "1g",
    }
    compose = Compose(podman, folder, "hypercast-test", values)
    running = Cluster(compose, ports)
    compose.run("down", "--volumes", "--timeout", 1, profiles=PROFILES)  # of a run that was killed
    try:
        begin_s = time.monotonic()
        compose.run("up", "--detach", "--no-build", profiles=PROFILES)
        note("containers created", f"{time.monotonic() - begin_s:.1f} s")
        running.until_ready("redis", *GATEWAYS, *NODES)
        until_seen("both nodes are there", lambda: running.ready_nodes() == set(NODES), failing=running.logs)
        note("cluster ready", f"{time.monotonic() - begin_s:.1f} s after `up` began")
        yield running
    finally:
        compose.run("down", "--volumes", "--timeout", 45, profiles=PROFILES)
