"""A start from zero of a function with engine: vllm, on a platform."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import httpx2

from benchmarks.harness.local_platform import PlatformStateError, RunningPlatform, run_cli

_PAUSE_S = 0.05
WAIT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformStart:
    """Seconds from the request; `largest_gap_s` is between two chunks of its stream."""

    first_token_s: float
    ready_s: float
    largest_gap_s: float
    tokens: Sequence[int]


class VllmPlatform:
    """`hypercast up` with vLLM, while the block lasts."""

    def __init__(self, data: Path, python: Path, nodes: int = 1) -> None:
        self.data = data
        self._flags = ("--nodes", str(nodes), "--vllm-python", str(python), "--vllm-memory", "6GiB")

    def __enter__(self) -> "VllmPlatform":
        self._run("up", "--detach", "--port", "0", "--data-dir", str(self.data), *self._flags)
        running = RunningPlatform.of(self.data)
        self.env = {"HYPERCAST_URL": running.urls[0], "HYPERCAST_API_KEY": running.admin_key}
        return self

    def __exit__(self, *_: object) -> None:
        run_cli("down", "--data-dir", str(self.data))

    def run(self, *arguments: str) -> str:
        """Run `hypercast …` against it. Raises PlatformStateError."""
        return self._run(*arguments, env=self.env)

    def _run(self, *arguments: str, env: dict[str, str] | None = None) -> str:
        done = run_cli(*arguments, env=env)
        if done.returncode:
            raise PlatformStateError(f"hypercast {arguments[0]}: {done.stderr.strip()[-800:]}")
        return done.stdout

    def start(self, function: str, prompt: Sequence[int], tokens: int) -> PlatformStart:
        """Put the function to sleep, and stream from it. Raises PlatformStateError."""
        self.run("scale", function, "--instances", "0")
        self._until(lambda: not self._engines(function), "the function does not sleep")
        arrived: list[float] = []
        ids: list[int] = []
        body = {
            "model": function,
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "return_token_ids": True,
            "ignore_eos": True,
        }
        began = time.monotonic()
        with self._http() as http, http.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    ids += json.loads(line[6:])["choices"][0].get("token_ids") or []
                    arrived.append(time.monotonic() - began)
        ready_s = self._until(lambda: self._engines(function) == ["vllm"], "vLLM is not ready") - began
        gaps = [after - before for before, after in pairwise(arrived)]
        return PlatformStart(
            first_token_s=arrived[0], ready_s=ready_s, largest_gap_s=max(gaps, default=0.0), tokens=ids
        )

    def _http(self) -> httpx2.Client:
        headers = {"authorization": f"Bearer {self.env['HYPERCAST_API_KEY']}"}
        return httpx2.Client(base_url=self.env["HYPERCAST_URL"], headers=headers, timeout=WAIT_S)

    def _engines(self, function: str) -> list[str]:
        with self._http() as http:
            instances = http.get("/admin/instances").json()["instances"]
        return [
            one["engine"] for one in instances if one["function"] == function and one["state"] != "stopped"
        ]

    def _until(self, holds: object, failure: str) -> float:
        """Return when it holds. Raises PlatformStateError after WAIT_S."""
        assert callable(holds)
        until = time.monotonic() + WAIT_S
        while not holds():
            if time.monotonic() > until:
                raise PlatformStateError(failure)
            time.sleep(_PAUSE_S)
        return time.monotonic()
