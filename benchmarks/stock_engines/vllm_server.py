"""A server of vLLM without a platform, as a user starts it."""

import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx2

from invoker.vllm.arguments import VllmSpec, server_command, server_environment
from invoker.vllm.model_infos import ModelInfos

_PAUSE_S = 0.02
START_S = 300.0


class ServerDied(RuntimeError):
    """The server ended before it was ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTimes:
    """Seconds from the start of the process."""

    ready_s: float
    first_token_s: float


def start_once(
    python: Path,
    folder: Path,
    prompt: Sequence[int],
    infos: ModelInfos,
    *,
    loader: dict[str, str] | None = None,
) -> StartTimes:
    """Start a server on a folder with a model, generate one token, and end it. Raises ServerDied.

    `infos` is what earlier starts have left, as a user's cache has it.
    """
    with tempfile.TemporaryDirectory(prefix="hc-") as scratch, open(Path(scratch) / "log", "wb") as log:
        spec = VllmSpec(
            python=python,
            folder=folder,
            scratch=Path(scratch),
            name="model",
            dtype="float32",
            context_length=1024,
            max_sequences=8,
            device="cpu",
            memory_bytes=4 << 30,
            loader=loader or {},
        )
        infos.write_into(Path(scratch))
        began = time.monotonic()
        process = subprocess.Popen(
            server_command(spec),
            env=server_environment(spec, os.environ),
            stdout=log,
            stderr=log,
            cwd=scratch,
            start_new_session=True,
        )
        try:
            times = _times(process, spec, prompt, began, Path(scratch) / "log")
            infos.keep(Path(scratch))
            return times
        finally:
            os.killpg(process.pid, 9)
            process.wait()


def _times(
    process: subprocess.Popen[bytes], spec: VllmSpec, prompt: Sequence[int], began: float, log: Path
) -> StartTimes:
    transport = httpx2.HTTPTransport(uds=str(spec.socket))
    with httpx2.Client(transport=transport, base_url="http://vllm", timeout=START_S) as http:
        while True:
            try:
                if http.get("/health").status_code == 200:
                    break
            except httpx2.HTTPError:
                pass
            if process.poll() is not None or time.monotonic() - began > START_S:
                raise ServerDied(log.read_text(errors="replace")[-2000:])
            time.sleep(_PAUSE_S)
        ready_s = time.monotonic() - began
        body = {"model": "model", "prompt": list(prompt), "max_tokens": 1, "temperature": 0}
        answer = http.post("/v1/completions", json=body)
        if answer.status_code != 200:
            raise ServerDied(answer.text[:500])
        return StartTimes(ready_s=ready_s, first_token_s=time.monotonic() - began)
