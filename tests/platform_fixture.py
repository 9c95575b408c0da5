"""A running platform for integration tests: `hypercast up` in a temporary folder, as a user runs it."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import psutil

from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parent.parent
# A slow machine has that long for what a command does or what is waited for: only hangs take it.
COMMAND_S = 240.0
GRAVE = re.compile(r" (WARNING|ERROR|CRITICAL) |Traceback|^\w*(Error|Exception)\b")


@dataclass
class Platform:
    """One data directory, started and stopped by the command line."""

    data: Path
    flags: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    first_s: float = 0.0  # what its first start took
    url: str = ""
    key: str = ""

    def up(self) -> float:
        """Start it; returns the seconds until the command came back."""
        began = time.monotonic()
        self.run("up", "--detach", "--port", "0", "--data-dir", str(self.data), *self.flags)
        took_s = time.monotonic() - began
        self.first_s = self.first_s or took_s
        self.url = json.loads((self.data / "up.json").read_text())["url"]
        self.key = (self.data / "admin.key").read_text().strip()
        self.env = {"HYPERCAST_URL": self.url, "HYPERCAST_API_KEY": self.key}
        return took_s

    def down(self) -> None:
        self.run("down", "--data-dir", str(self.data), check=False)

    def run(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run `hypercast …`; a failure shows what it printed and the platform's logs."""
        done = subprocess.run(
            [sys.executable, "-m", "cli", *arguments],
            cwd=ROOT,
            env={**os.environ, **self.env},
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        if check and done.returncode:
            ended = f"hypercast {' '.join(arguments)} ended with {done.returncode}"
            raise AssertionError(f"{ended}:\n{done.stdout}\n{done.stderr}\n{self.logs()}")
        return done

    def json(self, *arguments: str) -> Any:
        return json.loads(self.run(*arguments, "-o", "json").stdout)

    def nodes(self) -> list[dict[str, Any]]:
        return self.get("/admin/nodes")["nodes"]

    def instances(self, function: str) -> list[dict[str, Any]]:
        return [
            {**instance, "node": node["id"], "pid": node["pid"]}
            for node in self.nodes()
            for instance in node["instances"]
            if instance["function"] == function
        ]

    def process(self, name: str) -> psutil.Process:
        """The part of it that writes the log of that name: "redis", "gateway-1", "node-0", "zygote"."""
        supervisor = psutil.Process(json.loads((self.data / "up.json").read_text())["pid"])
        log = self.data / "logs" / f"{name}.log"
        return next(part for part in supervisor.children(recursive=True) if _output(part) == log)

    def counter(self, name: str) -> int:
        return sum(node["counters"].get(name, 0) for node in self.nodes())

    def get(self, path: str) -> Any:
        with self.http() as http:
            response = http.get(path)
            assert response.status_code == 200, response.text
            return response.json()

    def http(self) -> httpx2.Client:
        return httpx2.Client(
            base_url=self.url,
            headers={"authorization": f"Bearer {self.key}"},
            timeout=COMMAND_S,
            trust_env=False,
        )

    def until(self, what: str, holds: Callable[[], Any], timeout_s: float = PATIENCE_S) -> Any:
        """Wait for something that only the platform's own interfaces show; returns its first true value."""
        deadline = time.monotonic() + timeout_s
        while not (value := holds()):
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {timeout_s:g} s in vain until {what}\n{self.logs()}")
            time.sleep(0.05)
        return value

    def logs(self, lines: int = 12) -> str:
        """The end of each log, and before it the last warnings, which may lie far above."""
        shown = []
        for path in sorted((self.data / "logs").glob("*.log")):
            said = path.read_text(errors="replace").splitlines()
            warned = [line for line in said[:-lines] if GRAVE.search(line)][-lines:]
            shown += [f"--- {path.name}", *warned, *(["..."] if warned else []), *said[-lines:]]
        return "\n".join(shown)


def _output(process: psutil.Process) -> Path | None:
    try:
        return Path(f"/proc/{process.pid}/fd/2").readlink()
    except OSError:  # it is gone
        return None
