"""A platform of its own, of whose processes any can be killed and watched."""

import asyncio
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil

from benchmarks.machine import ROOT
from registry.redis_state import RedisState

_POLL_S = 0.03
_COMMAND_S = 300.0
_ZYGOTES = ("zygote", "zygote-gateway")
_TICKS = os.sysconf("SC_CLK_TCK")


class Kind(StrEnum):
    """What may be killed."""

    GATEWAY = "gateway"
    NODE = "node"
    REDIS = "redis"
    HANDLER = "handler"  # a process of a function's own code
    ZYGOTE = "zygote"
    SUPERVISOR = "supervisor"


@dataclass(frozen=True, slots=True)
class Part:
    """One process of the platform, by the name of its log; it keeps the name when it starts again."""

    kind: Kind
    name: str


class Cluster:
    """`hypercast up` in a folder."""

    def __init__(self, data: Path, *, nodes: int, gateways: int) -> None:
        self.data = data
        self.gateways = [Part(Kind.GATEWAY, f"gateway-{n}" if n else "gateway") for n in range(gateways)]
        self.nodes = [Part(Kind.NODE, f"node-{n}") for n in range(nodes)]
        self.redis = Part(Kind.REDIS, "redis")
        zygotes = [Part(Kind.ZYGOTE, name) for name in _ZYGOTES]
        self.others = [Part(Kind.HANDLER, "handler"), *zygotes, Part(Kind.SUPERVISOR, "supervisor")]
        self.urls: Sequence[str] = ()
        self._up: Sequence[str] = ()
        self.admin_key = ""
        self._supervisor: psutil.Process | None = None

    def __repr__(self) -> str:
        return f"<Cluster in {self.data}>"

    @property
    def parts(self) -> list[Part]:
        return [*self.gateways, *self.nodes, self.redis, *self.others]

    def up(self, *flags: str) -> None:
        """Start everything. Raises RuntimeError with what the command said."""
        nodes, port = str(len(self.nodes)), str(free_port(len(self.gateways)))
        self._up = (
            *("up", "--detach", "--port", port, "--data-dir", str(self.data), "--nodes", nodes),
            *("--hosts", nodes, "--gateways", str(len(self.gateways)), *flags),
        )
        self.up_again()

    def up_again(self) -> None:
        """Start everything as it was started before. Raises RuntimeError with what the command said."""
        self.command(*self._up)
        run = json.loads((self.data / "up.json").read_text())
        self.urls = tuple(run["urls"])
        self.admin_key = (self.data / "admin.key").read_text().strip()
        self._supervisor = psutil.Process(run["pid"])

    def down(self) -> None:
        self.command("down", "--data-dir", str(self.data))

    def command(self, *arguments: str, url: str = "") -> str:
        """What `hypercast …` prints. Raises RuntimeError if it fails."""
        env = {**os.environ, "HYPERCAST_API_KEY": self.admin_key}
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # what starts again does not compile everything anew
        if url or self.urls:
            env["HYPERCAST_URL"] = url or self.urls[0]
        done = subprocess.run(
            [sys.executable, "-m", "cli", *arguments],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            timeout=_COMMAND_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"hypercast {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def json(self, *arguments: str) -> Any:
        return json.loads(self.command(*arguments, "-o", "json"))

    def state(self) -> RedisState:
        """The platform's own state, beside its gateways."""
        return RedisState.connect(f"unix://{self.data / 'redis.sock'}")

    # Processes.

    @property
    def supervisor(self) -> psutil.Process:
        assert self._supervisor is not None, "not started"
        return self._supervisor

    def processes(self) -> dict[str, psutil.Process]:
        """Every process of the platform by the name of its log, the supervisor and the zygotes included.

        Nodes and gateways are a zygote's children, and the supervisor's once their zygote has died.
        """
        if not self.supervisor.is_running():
            return {}
        found = {"supervisor": self.supervisor}
        for child in _children(self.supervisor):
            name = self._log_of(child)
            if name in _ZYGOTES:
                found |= {
                    part: fork for fork in _children(child) if (part := self._log_of(fork)) not in ("", name)
                }
            if name:
                found[name] = child
        return found

    def handlers(self) -> list[psutil.Process]:
        """The processes of handlers: nodes start no others."""
        processes = self.processes()
        nodes = [processes[part.name] for part in self.nodes if part.name in processes]
        return [handler for node in nodes for handler in _children(node)]

    def strays(self) -> list[psutil.Process]:
        """Processes that write to the platform's logs but are no part of it."""
        known = {process.pid for process in self.processes().values()} if self.supervisor.is_running() else ()
        return [one for one in psutil.process_iter() if self._log_of(one) and one.pid not in known]

    def _log_of(self, process: psutil.Process) -> str:
        try:
            target = Path(f"/proc/{process.pid}/fd/2").readlink()
        except OSError:
            return ""
        return target.stem if target.parent == self.data / "logs" else ""

    def kill(self, part: Part) -> psutil.Process | None:
        """Kill it with SIGKILL; None if it is not there just now."""
        if part.kind is Kind.HANDLER:
            process = next(iter(self.handlers()), None)
        else:
            process = self.processes().get(part.name)
        if process is None:
            return None
        try:
            process.kill()
        except psutil.NoSuchProcess:
            return None
        return process

    async def restarted(self, part: Part, before: psutil.Process, timeout_s: float) -> float | None:
        """When (`time.monotonic`) its successor was started; None if there was none in time.

        The supervisor is started again by hand: that counts from when `up` says that all is there. A
        handler's process is started again by its next call.
        """
        if part.kind is Kind.HANDLER:
            return time.monotonic()
        if part.kind is Kind.SUPERVISOR:
            before.wait(timeout_s)
            await asyncio.to_thread(self.up_again)
            return time.monotonic()
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            process = self.processes().get(part.name)
            if process is not None and process.pid != before.pid:
                try:
                    return started_s(process.pid)
                except OSError:
                    pass  # it died at once
            await asyncio.sleep(_POLL_S)
        return None


def free_port(count: int) -> int:
    """The first of so many ports in a row that nobody listens on, below those that clients get."""
    while True:
        port = random.randrange(20_000, 30_000)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for number in range(port, port + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", number))
            return port


def started_s(pid: int) -> float:
    """When a process was started, by `time.monotonic`. Raises OSError if it is gone."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(after_name[19]) / _TICKS
    return time.monotonic() - age_s


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children())
    except psutil.NoSuchProcess:
        return []
