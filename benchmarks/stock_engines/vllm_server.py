"""Servers of vLLM without a platform: with the flags that a node gives them, or with vLLM's own defaults."""

import asyncio
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

from invoker.vllm.arguments import CACHE, VllmSpec, server_command, server_environment
from invoker.vllm.forking import VllmZygote, make_zygote
from invoker.vllm.model_infos import ModelInfos
from invoker.vllm.server import VllmServer
from invoker.vllm.zygote import SERVER
from rdmacast.aio.groups import run_all

_PAUSE_S = 0.02
START_S = 300.0
_STOP_S, _CLEAN_UP_S = 30.0, 2.0
_LOADED = re.compile(r"Hypercast: .* bytes, ([\d.]+) s")  # the line of our load format


class ServerDied(RuntimeError):
    """The server ended before it was ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStart:
    """A server to start on a folder with a model, and the request that it then answers.

    Flags and environment are those of a node's server, which with `loader` takes the weights by the plug-in;
    with `defaults` they are vLLM's own.
    """

    python: Path
    folder: Path
    prompt: Sequence[int]
    tokens: int = 1
    loader: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    defaults: bool = False

    def spec(self, scratch: Path) -> VllmSpec:
        return VllmSpec(
            python=self.python,
            folder=self.folder,
            scratch=scratch,
            name="model",
            dtype="float32",
            context_length=1024,
            max_sequences=8,
            device="cpu",
            memory_bytes=4 << 30,
            loader=self.loader,
            arguments=self.arguments,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTimes:
    """Seconds from the start of the process until it serves and until it has answered, with the tokens.

    `load_s` is how long the plug-in read weights, 0 without it.
    """

    ready_s: float
    first_token_s: float
    ids: tuple[int, ...]
    load_s: float


def start_together(starts: Sequence[ServerStart], infos: ModelInfos) -> list[StartTimes]:
    """Start servers at once, have each answer, and end them. Raises ServerDied.

    `infos` is what earlier starts have left, as a user's cache has it.
    """
    # The servers end before the threads, which wait for them.
    with ThreadPoolExecutor(len(starts)) as pool, ExitStack() as stack:
        scratches = [stack.enter_context(_scratch(infos)) for _ in starts]
        began = time.monotonic()
        running = [stack.enter_context(_running(*pair)) for pair in zip(starts, scratches, strict=True)]
        waits = [pool.submit(_times, *pair, began) for pair in zip(starts, running, strict=True)]
        times = [wait.result() for wait in waits]
        infos.keep(scratches[0])
        return times


# Starts servers at once, has each answer, and ends them.
StartTogether = Callable[[Sequence[ServerStart], ModelInfos], list[StartTimes]]


class PreloadedVllm:
    """A process that has imported vLLM, and forks servers; it does nothing else between them."""

    def __init__(self, runner: asyncio.Runner, zygote: VllmZygote) -> None:
        self._runner = runner
        self._zygote = zygote

    def __repr__(self) -> str:
        return f"PreloadedVllm({self._zygote!r})"

    def start_together(self, starts: Sequence[ServerStart], infos: ModelInfos) -> list[StartTimes]:
        """Fork servers at once, have each answer, and end them. Raises ServerDied, ServerFailed."""
        with ExitStack() as stack:
            scratches = [stack.enter_context(_scratch(infos)) for _ in starts]
            # The servers end before the threads, which wait for them.
            pool = stack.enter_context(ThreadPoolExecutor(len(starts)))
            return self._runner.run(self._start_together(starts, scratches, infos, pool))

    async def _start_together(
        self,
        starts: Sequence[ServerStart],
        scratches: Sequence[Path],
        infos: ModelInfos,
        pool: ThreadPoolExecutor,
    ) -> list[StartTimes]:
        if not self._zygote.ready.is_set():
            raise ServerDied("the process that has imported vLLM ended")
        times: dict[Path, StartTimes] = {}
        began = time.monotonic()

        async def run(start: ServerStart, scratch: Path) -> None:
            log = list[str]()
            spec = start.spec(scratch)
            server = await VllmServer.spawn(spec, log.append, _nothing, _nothing, zygote=self._zygote)
            try:
                running = _Running(spec=spec, has_ended=server.ended.is_set, log=lambda: "\n".join(log))
                wait = asyncio.get_running_loop().run_in_executor(pool, _times, start, running, began)
                times[scratch] = await wait
                infos.keep(scratch)
            finally:
                await server.aclose()

        await run_all(*map(run, starts, scratches))
        return [times[scratch] for scratch in scratches]


@contextmanager
def preloaded_vllm(python: Path, folder: Path) -> Iterator[PreloadedVllm]:
    """Keep a process that has imported vLLM, in a new folder. Raises ServerDied."""
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        try:
            zygote = make_zygote(python, "cpu", folder)
            runner.run(stack.enter_async_context(zygote.running()))
            try:
                runner.run(asyncio.wait_for(zygote.ready.wait(), START_S))
            except TimeoutError:
                raise ServerDied("no process could import vLLM") from None
            yield PreloadedVllm(runner, zygote)
        finally:
            runner.run(stack.aclose())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    """A server's process: whether it has ended, and its log."""

    spec: VllmSpec
    has_ended: Callable[[], bool]
    log: Callable[[], str]


@contextmanager
def _scratch(infos: ModelInfos) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hc-") as scratch:
        infos.write_into(Path(scratch))
        yield Path(scratch)


@contextmanager
def _running(start: ServerStart, scratch: Path) -> Iterator[_Running]:
    """Run a server in its own folder while the block lasts."""
    spec, log = start.spec(scratch), scratch / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            _default_command(spec) if start.defaults else server_command(spec),
            env=_default_environment(spec) if start.defaults else server_environment(spec, os.environ),
            stdout=output,
            stderr=output,
            cwd=scratch,
            start_new_session=True,
        )
    try:
        yield _Running(
            spec=spec,
            has_ended=lambda: process.poll() is not None,
            log=lambda: log.read_text(errors="replace"),
        )
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a server with all that it started; Python's resource tracker, which ignores SIGTERM, ends last.

    It removes what the others leave in shared memory, and so is not killed at once.
    """
    with suppress(ProcessLookupError):  # raised once all have ended
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
        deadline_s = time.monotonic() + _CLEAN_UP_S
        while time.monotonic() < deadline_s:
            os.killpg(process.pid, 0)
            time.sleep(_PAUSE_S)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _default_command(spec: VllmSpec) -> list[str]:
    """Return a server with only what it needs to be reached, of the same dtype, and without the compiler."""
    where = ("--model", str(spec.folder), "--served-model-name", spec.name, "--uds", str(spec.socket))
    same = ("--dtype", spec.dtype, "--enforce-eager", *spec.arguments)
    return [str(spec.python), "-m", SERVER, *where, *same]


def _default_environment(spec: VllmSpec) -> dict[str, str]:
    """Return a user's environment; without a size the KV cache would be 92 % of the machine's memory."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["VLLM_CPU_KVCACHE_SPACE"] = server_environment(spec, {})["VLLM_CPU_KVCACHE_SPACE"]
    return environment | {
        "VLLM_CACHE_ROOT": str(spec.scratch / CACHE),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _times(start: ServerStart, running: _Running, began: float) -> StartTimes:
    """Wait until the server has answered its request. Raises ServerDied."""
    transport = httpx2.HTTPTransport(uds=str(running.spec.socket))
    with httpx2.Client(transport=transport, base_url="http://vllm", timeout=START_S) as http:
        while True:
            try:
                if http.get("/health").status_code == 200:
                    break
            except httpx2.HTTPError:
                pass
            if running.has_ended() or time.monotonic() - began > START_S:
                raise ServerDied(running.log()[-2000:])
            time.sleep(_PAUSE_S)
        ready_s = time.monotonic() - began
        body = {
            "model": running.spec.name,
            "prompt": list(start.prompt),
            "max_tokens": start.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        try:
            answer = http.post("/v1/completions", json=body)
        except httpx2.HTTPError as error:
            raise ServerDied(f"{error}\n{running.log()[-2000:]}") from error
        first_token_s = time.monotonic() - began
        if answer.status_code != 200:
            raise ServerDied(f"{answer.text[:500]}\n{running.log()[-2000:]}")
        return StartTimes(
            ready_s=ready_s,
            first_token_s=first_token_s,
            ids=tuple(answer.json()["choices"][0]["token_ids"]),
            load_s=read_load_s(running.log()),
        )


def read_load_s(log: str) -> float:
    """Return the seconds that the plug-in needed for the weights, by a server's log, or 0."""
    found = _LOADED.search(log)
    return float(found[1]) if found else 0.0


def _nothing() -> None:
    """Do nothing when a server is ready or closed."""
