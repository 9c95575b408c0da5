"""A server of vLLM without a platform: with the flags that a node gives it, or with vLLM's own defaults."""

import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx2

from invoker.vllm.arguments import CACHE, VllmSpec, server_command, server_environment
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
    loader: Mapping[str, str] | None = None,
    defaults: bool = False,
) -> StartTimes:
    """Start a server on a folder with a model, generate one token, and end it. Raises ServerDied.

    `infos` is what earlier starts have left, as a user's cache has it. Flags and environment are those of a
    node's server, which with `loader` takes the weights by the plug-in; with `defaults` they are vLLM's own.
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
            _default_command(spec) if defaults else server_command(spec),
            env=_default_environment(spec) if defaults else server_environment(spec, os.environ),
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
            with suppress(ProcessLookupError):  # it has ended with all that it started
                os.killpg(process.pid, 9)
            process.wait()


def _default_command(spec: VllmSpec) -> list[str]:
    """Return a server with only what it needs to be reached, of the same dtype, and without the compiler."""
    where = ("--model", str(spec.folder), "--served-model-name", spec.name, "--uds", str(spec.socket))
    same = ("--dtype", spec.dtype, "--enforce-eager")
    return [str(spec.python), "-m", "vllm.entrypoints.openai.api_server", *where, *same]


def _default_environment(spec: VllmSpec) -> dict[str, str]:
    """Return a user's environment; without a size the KV cache would be 92 % of the machine's memory."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["VLLM_CPU_KVCACHE_SPACE"] = server_environment(spec, {})["VLLM_CPU_KVCACHE_SPACE"]
    return environment | {
        "VLLM_CACHE_ROOT": str(spec.scratch / CACHE),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


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
            raise ServerDied(f"{answer.text[:500]}\n{log.read_text(errors='replace')[-2000:]}")
        return StartTimes(ready_s=ready_s, first_token_s=time.monotonic() - began)
