"""Starts and stops the process of a handler's guard, from which the handler forks."""

import asyncio
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

from invoker.handlers.confine import hide_memory
from invoker.handlers.guard import RENEW
from invoker.handlers.landlock import landlock_version

# The part of the node's environment that a handler inherits: the places of libraries and devices.
_INHERITED = ("LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "SSL_CERT_FILE", "TZ")


class ProcessOutput:
    """A pipe for both output streams.

    It is not the event loop's own pipe, which keeps the process alive for as long as a descendant holds the
    pipe open.
    """

    def __init__(
        self, reader: asyncio.StreamReader, transport: asyncio.ReadTransport, write_end: int
    ) -> None:
        self.reader = reader
        self.write_end = write_end
        self._transport = transport

    @classmethod
    async def open(cls) -> "ProcessOutput":
        read_end, write_end = os.pipe()
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", 0)
        )
        return cls(reader, transport, write_end)

    def close(self) -> None:
        """Close the reading end; remaining writers get an error."""
        self._transport.close()


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


def stop_process(process: asyncio.subprocess.Process) -> None:
    """Have the guard kill the handler with all that it started, and end."""
    _send(process, signal.SIGTERM)


def renew_cpu_limit(process: asyncio.subprocess.Process) -> None:
    """Have the guard allow limits.cpu from now on."""
    _send(process, RENEW)


def _send(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Send a signal unless the process has ended: its pid may then be another's."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.send_signal(number)
