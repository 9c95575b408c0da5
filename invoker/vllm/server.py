"""One vLLM server: a child process of the node, which answers on a Unix socket."""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

from invoker.handlers.guard import MEMORY_STATUS, TASKS_STATUS
from invoker.handlers.spawn import GuardProcess, ProcessOutput, stop_process
from invoker.vllm.arguments import VllmSpec, server_arguments, server_command, server_environment
from invoker.vllm.client import VllmClient
from invoker.vllm.errors import ServerFailed
from invoker.vllm.forking import ServerOrder, VllmZygote
from invoker.vllm.launch import END_S, MAX_TASKS
from rdmacast.aio.shielded import run_shielded
from rdmacast.aio.threads import run_in_thread

_FIRST_TRY_S, _LAST_TRY_S = 0.02, 0.1  # between attempts to connect, while it starts
_LAST_LINES = 8  # of its output, in the error of a failed start


class VllmServer:
    """A running server. `ended` is set once it has ended with all that it started."""

    def __init__(
        self,
        spec: VllmSpec,
        process: GuardProcess,
        output: ProcessOutput,
        log: Callable[[str], None],
        on_ready: Callable[[], None],
        on_ended: Callable[[], None],
    ) -> None:
        self._spec = spec
        self._process = process
        self._output = output
        self._log = log
        self._on_ready = on_ready
        self._on_ended = on_ended
        self._last: list[str] = []
        self._stopped = False
        self.client = VllmClient(spec.socket, spec.name, max_connections=spec.max_sequences + 64)
        self.ended = asyncio.Event()
        output.start(self._on_line, f"log of {spec.name}")
        self._waiter = asyncio.create_task(self._wait(), name=f"end of {spec.name}")

    def __repr__(self) -> str:
        state = "ended" if self.ended.is_set() else "runs"
        return f"<VllmServer {self._spec.name} pid {self._process.pid} {state}>"

    @classmethod
    async def spawn(
        cls,
        spec: VllmSpec,
        log: Callable[[str], None],
        on_ready: Callable[[], None],
        on_ended: Callable[[], None],
        zygote: VllmZygote | None = None,
    ) -> "VllmServer":
        """Start the process, from a `zygote` that is ready. Raises ServerFailed.

        `on_ready` is called in a thread once it answers, `on_ended` in one once it is closed.
        """
        output = await ProcessOutput.open()
        try:
            process = await _start(spec, output.write_end, zygote)
        except BaseException as error:
            output.close()
            if isinstance(error, OSError):
                raise ServerFailed(f"vLLM cannot be started: {error}") from error
            raise
        finally:
            os.close(output.write_end)
        return cls(spec, process, output, log, on_ready, on_ended)

    async def wait_ready(self) -> None:
        """Return once the server answers. Raises ServerFailed if it ends before."""
        pause_s = _FIRST_TRY_S
        while not await self.client.is_ready():
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self.ended.wait()
            if self.ended.is_set():
                raise ServerFailed(self.reason)
            pause_s = min(2 * pause_s, _LAST_TRY_S)
        await run_in_thread(self._on_ready)

    @property
    def reason(self) -> str:
        """Why it has ended, with its last lines."""
        return "; ".join([f"vLLM {self._exit_reason()}", *self._last])

    async def aclose(self) -> None:
        """Kill the server and all that it started. Idempotent."""
        self._stopped = True
        stop_process(self._process)
        await run_shielded(self._closed())

    async def _closed(self) -> None:
        await self.ended.wait()
        await self.client.aclose()
        await asyncio.to_thread(shutil.rmtree, self._spec.scratch, ignore_errors=True)
        await asyncio.to_thread(self._on_ended)

    async def _wait(self) -> None:
        await self._process.wait()
        await self._output.drain()
        self.ended.set()

    def _exit_reason(self) -> str:
        code = self._process.returncode
        match code:
            case None:
                return "runs"
            case _ if self._stopped:
                return "was stopped"
            case _ if code == MEMORY_STATUS:
                return f"exceeded its memory of {self._spec.memory_bytes} bytes (see --vllm-memory)"
            case _ if code == TASKS_STATUS:
                return "started too many processes and threads"
            case _ if code < 0:
                return f"was killed by {signal.Signals(-code).name}"
            case _:
                return f"ended with status {code}"

    def _on_line(self, line: str) -> None:
        if "Error" in line or "error" in line:
            self._last = [*self._last, line.strip()[:300]][-_LAST_LINES:]
        self._log(line)


async def _start(spec: VllmSpec, output: int, zygote: VllmZygote | None) -> GuardProcess:
    environment = server_environment(spec, os.environ)
    if zygote is not None and zygote.ready.is_set():
        order = ServerOrder(
            id=str(spec.scratch),
            arguments=server_arguments(spec),
            environment=environment,
            folder=spec.scratch,
            memory_bytes=spec.memory_bytes,
            tasks=MAX_TASKS,
            end_s=END_S,
        )
        return await zygote.fork(order, output)
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-I", "-B", "-m", "invoker.vllm.launch", str(os.getpid()), str(spec.memory_bytes)),
        *server_command(spec),
        cwd=spec.scratch,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )
