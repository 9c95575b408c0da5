"""Podman with a store of its own, and base images made from Debian's packages, as no registry is needed."""

import ast
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Images stay here between runs: the second build takes seconds.
FOLDER = Path(os.environ.get("HYPERCAST_CONTAINERS", ROOT / ".containers"))
PYTHON, REDIS, IMAGE = "python:3.11-slim", "redis:7.2-alpine", "hypercast:0.1.0"
_SET = "3"  # NET_ADDR_SET: the kernel does not change the address of this link
LIMIT_S = 1800.0  # of a command, and of a test with what it needs: builds are long on a busy machine

# A file that shows that a package is installed.
PACKAGES: dict[str, Callable[[], object]] = {
    "podman": lambda: shutil.which("podman"),
    "runc": lambda: shutil.which("runc", path="/usr/sbin:/sbin:/usr/bin"),
    "netavark": lambda: Path("/usr/lib/podman/netavark").exists(),
    "aardvark-dns": lambda: Path("/usr/lib/podman/aardvark-dns").exists(),
    "catatonit": lambda: list(Path("/usr").glob("*/*/catatonit")) or shutil.which("catatonit"),
    "debootstrap": lambda: shutil.which("debootstrap", path="/usr/sbin:/sbin:/usr/bin"),
    "iproute2": lambda: shutil.which("ip", path="/usr/sbin:/sbin:/usr/bin"),
    "iptables": lambda: shutil.which("iptables", path="/usr/sbin:/sbin:/usr/bin"),
    "openssl": lambda: shutil.which("openssl"),
}

_REDIS = """\
FROM {python}
RUN apt-get update && apt-get install --yes --no-install-recommends redis-server
RUN install --directory --owner 999 --group 1000 /data
"""


def missing() -> list[str]:
    """Return the packages that are not installed."""
    return [name for name, is_there in PACKAGES.items() if not is_there()]


class Failed(AssertionError):
    """A command of podman failed; the text is what it wrote."""


@dataclass(frozen=True, slots=True)
class Podman:
    """Commands of podman with the settings of this machine."""

    folder: Path
    environment: Mapping[str, str] = field(repr=False)

    def run(self, *arguments: object, within_s: float = LIMIT_S, stdin: str | None = None) -> str:
        """Run a command; return its output. Raises Failed."""
        done = self.attempt(*arguments, within_s=within_s, stdin=stdin)
        if done.returncode:
            raise Failed(
                f"podman {' '.join(map(str, arguments))}: {done.returncode}\n{done.stdout}{done.stderr}"
            )
        return done.stdout.strip()

    def attempt(
        self, *arguments: object, within_s: float = LIMIT_S, stdin: str | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command; return its status and output."""
        return subprocess.run(
            ["podman", *map(str, arguments)],
            env=self.environment,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            check=False,
            timeout=within_s,
        )

    def inspect(self, name: str, kind: str = "container") -> Any:
        """Return what podman has on a container, image, pod or volume."""
        return json.loads(self.run("inspect", "--type", kind, name))[0]

    def has_image(self, name: str) -> bool:
        return self.attempt("image", "exists", name).returncode == 0

    def build(self, context: Path, *arguments: object) -> float:
        """Build an image with this machine's settings of pip; return how long it took, in s."""
        begin_s = time.monotonic()
        # The host's network, for apt and pip; limits of the machine's own.
        options = ["--network=host", "--pull=never", *pip_volumes(self.folder)]
        self.run("build", "--quiet", *options, *arguments, context)
        return time.monotonic() - begin_s


def make_podman(folder: Path = FOLDER) -> Podman:
    """Return podman with a store in a folder; its settings are written anew."""
    folder.mkdir(parents=True, exist_ok=True)
    nofile = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 1 << 16)
    settings = folder / "containers.conf"
    # runc, as crun refuses a machine with both versions of cgroups. The default limits of podman may be above
    # those of this machine, which are then refused.
    settings.write_text(
        f"""\
[containers]
default_ulimits = ["nofile={nofile}:{nofile}", "nproc=4096:4096"]
log_driver = "k8s-file"
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
"""
    )
    storage = folder / "storage.conf"
    storage.write_text(
        f"""\
[storage]
driver = "overlay"
graphroot = "{folder}/store"
runroot = "{folder}/run"
"""
    )
    own = {
        "CONTAINERS_CONF": str(settings),
        "CONTAINERS_STORAGE_CONF": str(storage),
        # Without systemd there is nobody to run health checks at intervals: tests run them.
        "DISABLE_HC_SYSTEMD": "true",
    }
    return Podman(folder, {**os.environ, **own})


@contextmanager
def pinned_bridges() -> Iterator[None]:
    """Keep the MAC addresses of podman's bridges, as systemd-udevd does (MACAddressPolicy=persistent).

    A bridge has the lowest address of its ports unless one was set. Where there is no udev it changes as
    containers come and go: those that had the old one reach neither DNS nor the machine for up to a minute.
    """
    with subprocess.Popen(["ip", "-o", "monitor", "link"], stdout=subprocess.PIPE, text=True) as monitor:
        pinning = threading.Thread(target=_pin_all, args=(monitor.stdout,), daemon=True)
        pinning.start()
        try:
            yield
        finally:
            monitor.terminate()
            pinning.join()


def _pin_all(changes: Iterable[str]) -> None:
    for change in changes:
        if found := re.match(r"\d+: (podman\d+)\b", change):
            with suppress(OSError):  # it is gone again
                _pin(Path("/sys/class/net") / found[1])


def _pin(link: Path) -> None:
    if (link / "addr_assign_type").read_text().strip() != _SET:
        address = (link / "address").read_text().strip()
        subprocess.run(["ip", "link", "set", "dev", link.name, "address", address], check=False)


def provide_bases(podman: Podman) -> None:
    """Make the images that the Dockerfile and the compose file start from, unless they are there."""
    if not podman.has_image(PYTHON):
        root = podman.folder / "root"
        shutil.rmtree(root, ignore_errors=True)
        packages = "python3,python3-venv,python-is-python3,ca-certificates"
        made = subprocess.run(
            ["debootstrap", "--variant=minbase", f"--include={packages}", suite(), root, mirror()],
            capture_output=True,
            text=True,
            check=False,
        )
        assert made.returncode == 0, made.stdout[-2000:] + made.stderr
        shutil.rmtree(root / "var" / "cache" / "apt" / "archives", ignore_errors=True)
        archive = podman.folder / "root.tar"
        subprocess.run(["tar", "-C", root, "-cf", archive, "."], check=True)
        path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        podman.run("import", "--quiet", "--change", f"ENV {path}", archive, f"localhost/{PYTHON}")
        archive.unlink()
        shutil.rmtree(root)
    if not podman.has_image(REDIS):
        context = podman.folder / "redis"
        context.mkdir(exist_ok=True)
        (context / "Containerfile").write_text(_REDIS.format(python=PYTHON))
        podman.build(context, "--tag", f"localhost/{REDIS}")


def suite() -> str:
    """Return the name of this machine's release of Debian."""
    lines = dict(
        line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line
    )
    return lines["VERSION_CODENAME"].strip('"')


def mirror() -> str:
    """Return from where this machine takes Debian's packages."""
    for path in [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]:
        for line in path.read_text().splitlines() if path.is_file() else ():
            words = line.split()
            if words and words[0] == "URIs:":
                return words[1]
            if words and words[0] == "deb":
                return next(word for word in words[1:] if "://" in word)
    raise AssertionError("no source of packages in /etc/apt")


def pip_volumes(folder: Path) -> list[str]:
    """Return the options that give a build this machine's settings of pip, and the files that they name."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    settings: dict[str, str] = {}
    for line in listed.stdout.splitlines():
        key, _, value = line.partition("=")
        settings[key.rpartition(".")[2]] = str(ast.literal_eval(value))
    file = folder / "pip.conf"
    file.write_text("[global]\n" + "".join(f"{key} = {value}\n" for key, value in settings.items()))
    paths = {word for value in settings.values() for word in value.split()}
    named = {Path(path.removeprefix("file://")) for path in paths if path.startswith(("/", "file:///"))}
    # An index has its files beside it.
    volumes = {path.parent if path.name == "simple" else path for path in named if path.exists()}
    return [f"--volume={file}:/etc/pip.conf:ro", *(f"--volume={one}:{one}:ro" for one in sorted(volumes))]


@dataclass(frozen=True, slots=True)
class Compose:
    """A compose project, run by podman-compose."""

    podman: Podman
    folder: Path
    project: str
    values: Mapping[str, str] = field(default_factory=dict)  # of the variables of its file

    def run(self, *arguments: object, profiles: Sequence[str] = (), within_s: float = LIMIT_S) -> str:
        """Run a command; return its output. Raises Failed."""
        chosen = [f"--profile={name}" for name in profiles]
        command = [sys.executable, "-m", "podman_compose", "-p", self.project, *chosen, *map(str, arguments)]
        done = subprocess.run(
            command,
            cwd=self.folder,
            env={**self.podman.environment, **self.values},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=within_s,
        )
        if done.returncode:
            raise Failed(f"{' '.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def container(self, service: str) -> Any:
        """Return what podman has on the container of a service."""
        return self.podman.inspect(self.name(service))

    def name(self, service: str) -> str:
        """Return the id of the container of a service. Raises Failed if there is none."""
        labels = {"project": self.project, "service": service}
        filters = [f"--filter=label=com.docker.compose.{key}={value}" for key, value in labels.items()]
        found = self.podman.run("ps", "--all", "--quiet", "--no-trunc", *filters).split()
        if len(found) != 1:
            raise Failed(f"{len(found)} containers of {service}")
        return found[0]

    def exec(self, service: str, *command: object, within_s: float = LIMIT_S) -> str:
        """Run a command in the container of a service; return its output. Raises Failed."""
        return self.podman.run("exec", self.name(service), *command, within_s=within_s)
