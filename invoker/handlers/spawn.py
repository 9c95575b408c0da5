"""Starts and stops the process of a handler's guard, from which the handler forks."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from invoker.handlers.confine import hide_memory
from invoker.handlers.guard import RENEW
from invoker.handlers.landlock import landlock_version
from invoker.handlers.log_lines import WINDOW_S, LineSplitter
from rdmacast.aio.groups import cancel_and_discard

DRAIN_S = 1.0  # for what is still in transit after the process ended
_READ_BYTES = 16 * 1024
_FLOOD_PAUSE_S = 0.01

# The part of the node's environment that a handler inherits: the places of libraries and devices.
_INHERITED = ("LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "SSL_CERT_FILE", "TZ")


class ProcessOutput:
    """A pipe for both output streams, whose lines are passed on.

    It is not the event loop's own pipe, which keeps the process alive for as long as a descendant holds the
    pipe open.
    """

    def __init__(
        self, reader: asyncio.StreamReader, transport: asyncio.ReadTransport, write_end: int
    ) -> None:
        self.write_end = write_end
        self._reader = reader
        self._transport = transport
        self._pump: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls) -> "ProcessOutput":
        read_end, write_end = os.pipe()
        pipe, reader = os.fdopen(read_end, "rb", 0), asyncio.StreamReader()
        try:
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), pipe
            )
        except BaseException:
            pipe.close()
            os.close(write_end)
            raise
        return cls(reader, transport, write_end)

    def start(self, on_line: Callable[[str], None], name: str) -> None:
        """Pass on the lines from now on, in a task of that name."""
        self._pump = asyncio.create_task(self._read(LineSplitter(on_line)), name=name)

    async def drain(self) -> None:
        """Pass on what the ended process left, and close the pipe."""
        if self._pump is not None:
            await asyncio.wait([self._pump], timeout=DRAIN_S)
            await cancel_and_discard(self._pump)
        self.close()

    def close(self) -> None:
        """Close the reading end; remaining writers get an error."""
        self._transport.close()

    async def _read(self, lines: LineSplitter) -> None:
        try:
            while True:
                try:
                    # Dropped lines are reported even if no output follows.
                    async with asyncio.timeout(WINDOW_S if lines.dropped else None):
                        data = await self._reader.read(_READ_BYTES)
                except TimeoutError:
                    lines.report_dropped()
                    continue
                if not data:
                    return
                lines.feed(data)
                # A read of buffered data does not yield to other tasks. And a process that prints without
                # end is slowed down, rather than the node.
                await asyncio.sleep(_FLOOD_PAUSE_S if lines.dropped else 0)
        finally:
            lines.end()


async def start_process(folder: Path, theirs: socket.socket, output: int) -> asyncio.subprocess.Process:
    if landlock_version() < 1:
        # Without Landlock, only this protects the node's memory from a process of the same user.
        hide_memory()
    environment = {
        "PATH": os.defpath,
        "LANG": "C.UTF-8",
        "TMPDIR": str(folder),
        "MALLOC_ARENA_MAX": "2",
        **{name: os.environ[name] for name in _INHERITED if name in os.environ},
        "HOME": str(folder),
    }
    arguments = ["-I", "-B", "-m", "invoker.handlers.child", str(theirs.fileno()), str(os.getpid())]
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        cwd=folder,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=(theirs.fileno(),),
        start_new_session=True,
    )


class GuardProcess(Protocol):
    """The process of a guard: an asyncio.subprocess.Process, or what has the same methods."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int: ...

    def send_signal(self, signal: int, /) -> None: ...


def stop_process(process: GuardProcess) -> None:
    """Have the guard kill the handler with all that it started, and end."""
    _send(process, signal.SIGTERM)


def renew_cpu_limit(process: asyncio.subprocess.Process) -> None:
    """Have the guard allow limits.cpu from now on."""
    _send(process, RENEW)


def _send(process: GuardProcess, number: signal.Signals) -> None:
    """Send a signal unless the process has ended: its pid may then be another's."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.send_signal(number)
