"""The cluster starter: `hypercast up` in a folder, with processes that can be killed and inspected."""

import asyncio
import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import httpx2
import psutil

from benchmarks.harness.processes import ROOT
from registry.redis.state import RedisState

COMMAND_S = 300.0
_POLL_S = 0.03
_ZYGOTES = ("zygote", "zygote-gateway")
_TICKS = os.sysconf("SC_CLK_TCK")


class PlatformStateError(Exception):
    """The platform did not reach the state that the measurement needs."""


# What a benchmark on a platform can fail by; given to `recording`.
PLATFORM_FAILURES = (
    PlatformStateError,
    RuntimeError,
    OSError,
    subprocess.SubprocessError,
    httpx2.HTTPError,
    ExceptionGroup,
)


class ComponentKind(StrEnum):
    """What can be killed."""

    GATEWAY = "gateway"
    NODE = "node"
    REDIS = "redis"
    HANDLER = "handler"  # a process of a function's own code
    ZYGOTE = "zygote"
    SUPERVISOR = "supervisor"


@dataclass(frozen=True, slots=True)
class Component:
    """One process of the platform, by the name of its log, which it keeps when it is restarted."""

    kind: ComponentKind
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningPlatform:
    """What `hypercast up` wrote about a running platform."""

    urls: tuple[str, ...]
    admin_key: str
    pid: int  # the supervisor's

    @classmethod
    def of(cls, data: Path) -> "RunningPlatform":
        """Read the platform's folder. Raises OSError."""
        run = json.loads((data / "up.json").read_text())
        key = (data / "admin.key").read_text().strip()
        return cls(urls=tuple(run["urls"]), admin_key=key, pid=run["pid"])


def run_cli(
    *arguments: str, env: Mapping[str, str] | None = None, timeout_s: float = COMMAND_S
) -> subprocess.CompletedProcess[str]:
    """Run `hypercast …` from this tree, and return its exit status and output."""
    return subprocess.run(
        [sys.executable, "-m", "cli", *arguments],
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def log_of(process: psutil.Process, data: Path) -> str:
    """Return the name of the platform's log that a process writes, or ""."""
    try:
        target = Path(f"/proc/{process.pid}/fd/2").readlink()
    except OSError:
        return ""
    return target.stem if target.parent == data / "logs" else ""


class LocalPlatform:
    """A platform on this machine, each node on a virtual host of its own."""

    def __init__(self, data: Path, *, nodes: int, gateways: int = 1) -> None:
        self.data = data
        self.gateways = [
            Component(ComponentKind.GATEWAY, f"gateway-{n}" if n else "gateway") for n in range(gateways)
        ]
        self.nodes = [Component(ComponentKind.NODE, f"node-{n}") for n in range(nodes)]
        self.redis = Component(ComponentKind.REDIS, "redis")
        zygotes = [Component(ComponentKind.ZYGOTE, name) for name in _ZYGOTES]
        self.others = [
            Component(ComponentKind.HANDLER, "handler"),
            *zygotes,
            Component(ComponentKind.SUPERVISOR, "supervisor"),
        ]
        self.urls: Sequence[str] = ()
        self.admin_key = ""
        self._up: Sequence[str] = ()
        self._supervisor: psutil.Process | None = None

    def __repr__(self) -> str:
        return f"LocalPlatform({self.data}, {len(self.nodes)} nodes, {len(self.gateways)} gateways)"

    @property
    def url(self) -> str:
        return self.urls[0]

    @property
    def components(self) -> list[Component]:
        return [*self.gateways, *self.nodes, self.redis, *self.others]

    def up(self, *flags: str) -> None:
        """Start all processes. Raises RuntimeError with the command's error output."""
        nodes, port = str(len(self.nodes)), str(free_port(len(self.gateways)))
        self._up = (
            *("up", "--detach", "--port", port, "--data-dir", str(self.data), "--nodes", nodes),
            *("--hosts", nodes, "--gateways", str(len(self.gateways)), *flags),
        )
        self.restart()

    def restart(self) -> None:
        """Start the platform with its earlier flags. Raises RuntimeError with the command's error output."""
        self.command(*self._up)
        running = RunningPlatform.of(self.data)
        self.urls, self.admin_key = running.urls, running.admin_key
        self._supervisor = psutil.Process(running.pid)

    def down(self) -> None:
        self.command("down", "--data-dir", str(self.data))

    def command(self, *arguments: str, url: str = "") -> str:
        """Return the output of `hypercast …`. Raises RuntimeError if it fails."""
        env = {"HYPERCAST_API_KEY": self.admin_key}
        env["PYTHONDONTWRITEBYTECODE"] = ""  # restarted processes then need not compile everything again
        if url or self.urls:
            env["HYPERCAST_URL"] = url or self.url
        done = run_cli(*arguments, env=env)
        if done.returncode:
            raise RuntimeError(f"hypercast {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def json(self, *arguments: str) -> Any:
        return json.loads(self.command(*arguments, "-o", "json"))

    def state(self) -> RedisState:
        """Connect to the platform's state, past its gateways."""
        return RedisState.connect(f"unix://{self.data / 'redis.sock'}")

    # Processes.

    @property
    def supervisor(self) -> psutil.Process:
        assert self._supervisor is not None, "not started"
        return self._supervisor

    def processes(self) -> dict[str, psutil.Process]:
        """Return every process by the name of its log, with the supervisor and the zygotes.

        Nodes and gateways are children of a zygote, and of the supervisor once their zygote has died.
        """
        if not self.supervisor.is_running():
            return {}
        found = {"supervisor": self.supervisor}
        for child in _children(self.supervisor):
            name = log_of(child, self.data)
            if name in _ZYGOTES:
                forks = {log_of(fork, self.data): fork for fork in _children(child)}
                found |= {fork_name: fork for fork_name, fork in forks.items() if fork_name not in ("", name)}
            if name:
                found[name] = child
        return found

    def handlers(self) -> list[psutil.Process]:
        """Return the handler processes: each is the child of its guard, and nodes have no other children."""
        processes = self.processes()
        nodes = [processes[node.name] for node in self.nodes if node.name in processes]
        guards = [guard for node in nodes for guard in _children(node)]
        return [handler for guard in guards for handler in _children(guard)]

    def strays(self) -> list[psutil.Process]:
        """Return processes that write to the platform's logs but are not supervised."""
        running = self.supervisor.is_running()
        known = {process.pid for process in self.processes().values()} if running else ()
        return [one for one in psutil.process_iter() if log_of(one, self.data) and one.pid not in known]

    def kill(self, component: Component) -> psutil.Process | None:
        """Send SIGKILL; return the process, or None if it is not running."""
        if component.kind is ComponentKind.HANDLER:
            process = next(iter(self.handlers()), None)
        else:
            process = self.processes().get(component.name)
        if process is None:
            return None
        try:
            process.kill()
        except psutil.NoSuchProcess:
            return None
        return process

    async def restarted(self, component: Component, before: psutil.Process, timeout_s: float) -> float | None:
        """Return when (`time.monotonic`) its successor started, or None after the timeout.

        The supervisor is restarted here, and counts from when `up` reports that all processes are ready. A
        handler's process is restarted by its next call.
        """
        if component.kind is ComponentKind.HANDLER:
            return time.monotonic()
        if component.kind is ComponentKind.SUPERVISOR:
            before.wait(timeout_s)
            await asyncio.to_thread(self.restart)
            return time.monotonic()
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            process = self.processes().get(component.name)
            if process is not None and process.pid != before.pid:
                try:
                    return started_s(process.pid)
                except OSError:
                    pass  # it died at once
            await asyncio.sleep(_POLL_S)
        return None


@contextmanager
def running_platform(
    folder: Path | None, *flags: str, nodes: int, gateways: int = 1
) -> Iterator[LocalPlatform]:
    """Run a platform with these flags of `hypercast up`; its folder is removed unless given.

    Raises RuntimeError.
    """
    data = folder or Path(tempfile.mkdtemp(prefix="hypercast-benchmark-"))
    platform = LocalPlatform(data, nodes=nodes, gateways=gateways)
    try:
        try:
            platform.up(*flags)
        except BaseException:
            with suppress(RuntimeError):  # nothing was started
                platform.down()
            raise
        try:
            yield platform
        finally:
            platform.down()
    finally:
        if folder is None:
            shutil.rmtree(data, ignore_errors=True)


def free_port(count: int = 1) -> int:
    """Return the first of `count` consecutive free ports, below those that clients are assigned."""
    while True:
        port = random.randrange(20_000, 30_000)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for number in range(port, port + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", number))
            return port


def started_s(pid: int) -> float:
    """Return when a process was started, by `time.monotonic`. Raises OSError if it has ended."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(after_name[19]) / _TICKS
    return time.monotonic() - age_s


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children())
    except psutil.NoSuchProcess:
        return []
