"""The node's side of the zygote: forks servers from a process that has imported vLLM."""

import asyncio
import itertools
import json
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from invoker.handlers.spawn import ProcessOutput
from invoker.vllm import zygote
from invoker.vllm.arguments import base_environment
from invoker.vllm.errors import ServerFailed
from rdmacast.aio.groups import cancel_and_discard
from rdmacast.aio.shielded import run_shielded

RESTART_S = 10.0  # after a zygote has ended; until the next is ready, servers import vLLM themselves

log = logging.getLogger("invoker.vllm")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOrder:
    """A server to fork; `environment` adds to the zygote's, `folder` is where it starts."""

    id: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    memory_bytes: int
    tasks: int
    end_s: float


class ForkedGuard:
    """The guard of a forked server, with what is needed of an asyncio.subprocess.Process."""

    def __init__(self, node_end: socket.socket, name: str, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._node_end = node_end
        self._name = name
        self._ended = asyncio.Event()

    def __repr__(self) -> str:
        return f"<ForkedGuard {self._name} pid {self.pid}>"

    async def wait(self) -> int:
        """Return the exit code once the guard has ended."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Have the zygote send SIGTERM; other signals are not for guards."""
        assert number == signal.SIGTERM
        _stop(self._node_end, self._name)

    def on_ended(self, status: int) -> None:
        self.returncode = status
        self._ended.set()


class VllmZygote:
    """A zygote, started again when it dies; its servers die with it."""

    def __init__(
        self, python: Path, folder: Path, environment: Mapping[str, str], restart_s: float = RESTART_S
    ) -> None:
        self._restart_s = restart_s
        self._python = python
        self._folder = folder
        self._environment = environment
        self._node_end: socket.socket | None = None  # of a zygote that is ready
        self._guards: dict[str, ForkedGuard] = {}
        self._forks: dict[str, asyncio.Future[ForkedGuard]] = {}
        self._checks: dict[str, asyncio.Future[str]] = {}
        self._numbers = itertools.count()
        self.ready = asyncio.Event()

    def __repr__(self) -> str:
        return f"<VllmZygote {self._python} {'ready' if self.ready.is_set() else 'starts'}>"

    @asynccontextmanager
    async def running(self) -> AsyncIterator["VllmZygote"]:
        """Keep a zygote running while the block lasts."""
        keeper = asyncio.create_task(self._keep(), name="vLLM zygote")
        try:
            yield self
        finally:
            await cancel_and_discard(keeper)

    async def fork(self, order: ServerOrder, output: int) -> ForkedGuard:
        """Fork a server that writes to the descriptor `output`. Raises ServerFailed unless it is ready."""
        if self._node_end is None:
            raise ServerFailed("the process with vLLM imported is not ready")
        fork = asyncio.get_running_loop().create_future()
        self._forks[order.id] = fork
        message = {
            "id": order.id,
            "arguments": list(order.arguments),
            "environment": dict(order.environment),
            "folder": str(order.folder),
            "memory_bytes": order.memory_bytes,
            "tasks": order.tasks,
            "end_s": order.end_s,
        }
        node_end = self._node_end
        try:
            _send(node_end, message, output)
            guard: ForkedGuard = await fork
        except BaseException:
            _stop(node_end, order.id)
            raise
        finally:
            del self._forks[order.id]
        return guard

    async def check(self, request: Mapping[str, Sequence[str]]) -> str:
        """Return what vLLM has against a request of `check_args`. Raises ServerFailed unless it is ready."""
        if self._node_end is None:
            raise ServerFailed("the process with vLLM imported is not ready")
        name = f"check {next(self._numbers)}"
        check = self._checks[name] = asyncio.get_running_loop().create_future()
        node_end = self._node_end
        try:
            _send(node_end, {"id": name, "check": request})
            return await check
        finally:
            _stop(node_end, name)
            del self._checks[name]

    async def _keep(self) -> None:
        while True:
            try:
                status = await self._run()
            except OSError as error:
                log.warning("%s cannot be started: %s", self._python, error)
            else:
                log.warning("the process with vLLM imported ended with status %s", status)
            await asyncio.sleep(self._restart_s)

    async def _run(self) -> int:
        """Start a zygote, and follow it to its end; return its exit status. Raises OSError."""
        node_end, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with node_end:
            node_end.setblocking(False)
            with its_end:
                output = await ProcessOutput.open()
                try:
                    process = await asyncio.create_subprocess_exec(
                        *(self._python, "-I", "-B", zygote.__file__, str(os.getpid())),
                        cwd=self._folder,
                        env=dict(self._environment),
                        stdin=its_end.fileno(),
                        stdout=output.write_end,
                        stderr=output.write_end,
                        start_new_session=True,
                    )
                except BaseException:
                    output.close()
                    raise
                finally:
                    os.close(output.write_end)
            output.start(lambda line: log.debug("zygote: %s", line), "log of the zygote")
            try:
                with suppress(ConnectionResetError):  # it was killed with a request unread
                    await self._follow(node_end)
            finally:
                self.ready.clear()
                self._node_end = None
                status = await run_shielded(self._end(process, output))
            return status

    async def _end(self, process: asyncio.subprocess.Process, output: ProcessOutput) -> int:
        if process.returncode is None:
            process.kill()
        status = await process.wait()
        await output.drain()
        waiting: list[asyncio.Future[Any]] = [*self._forks.values(), *self._checks.values()]
        for future in waiting:
            if not future.done():
                ended = f"the process with vLLM imported ended with status {status}"
                future.set_exception(ServerFailed(ended))
        guards, self._guards = self._guards, {}
        for guard in guards.values():
            guard.on_ended(-signal.SIGKILL)
        return status

    async def _follow(self, node_end: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while data := await loop.sock_recv(node_end, zygote.MAX_MESSAGE_BYTES):
            match json.loads(data):
                case {"ready": True}:
                    self._node_end = node_end
                    self.ready.set()
                case {"id": str(name), "error": str(error)}:
                    self._checked(name, error)
                case {"id": str(name), "status": int(status)}:
                    guard = self._guards.pop(name, None)
                    if guard is None:
                        self._checked(name, ServerFailed(f"the check ended with status {status}"))
                    else:
                        guard.on_ended(status)
                case {"id": str(name), "pid": int(pid)} if name in self._forks:
                    self._guards[name] = ForkedGuard(node_end, name, pid)
                    if not self._forks[name].done():
                        self._forks[name].set_result(self._guards[name])

    def _checked(self, name: str, result: "str | ServerFailed") -> None:
        check = self._checks.get(name)
        if check is None or check.done():
            return
        if isinstance(result, str):
            check.set_result(result)
        else:
            check.set_exception(result)


def make_zygote(python: Path, device: str, folder: Path, restart_s: float = RESTART_S) -> VllmZygote:
    """Return a zygote for servers on the device, which starts in a new folder."""
    folder.mkdir()
    return VllmZygote(python, folder, base_environment(folder, device, os.environ), restart_s)


def _stop(node_end: socket.socket, name: str) -> None:
    with suppress(ServerFailed):  # its servers end with it
        _send(node_end, {"stop": name})


def _send(node_end: socket.socket, message: Mapping[str, Any], *descriptors: int) -> None:
    """Send a message, which is small. Raises ServerFailed unless the zygote takes it at once."""
    try:
        socket.send_fds(node_end, [json.dumps(message).encode()], list(descriptors))
    except OSError as error:
        raise ServerFailed(f"the process with vLLM imported takes no request: {error}") from error
