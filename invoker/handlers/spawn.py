"""Starts a handler's process, and kills it with all its descendants."""

import asyncio
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from invoker.handlers import confine
from registry.config.function_yaml import HandlerSpec

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


async def start_process(
    spec: HandlerSpec, folder: Path, theirs: socket.socket, output: int
) -> asyncio.subprocess.Process:
    if confine.landlock_version() < 1:
        # Without Landlock, only this protects the node's memory from a process of the same user.
        confine.hide_memory()
    environment = {
        "PATH": os.defpath,
        "LANG": "C.UTF-8",
        "TMPDIR": str(folder),
        "MALLOC_ARENA_MAX": "2",
        **{name: os.environ[name] for name in _INHERITED if name in os.environ},
        **spec.env,
        "HOME": str(folder),  # marks the handler's descendants, see kill_strays
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


def kill_tree(process: asyncio.subprocess.Process) -> None:
    """Kill the process, its group, and those of its descendants that left the group.

    If the process has ended, nothing is killed: its pid may have been reused. See kill_strays.
    """
    if process.returncode is not None:
        return
    descendants: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        descendants = psutil.Process(process.pid).children(recursive=True)
    # The handler first: it must not outlive its children.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for descendant in descendants:
        with suppress(psutil.NoSuchProcess):
            descendant.kill()


def kill_strays(folder: Path, group: int, ended_s: float) -> None:
    """Kill the remaining descendants of a process that ended at `ended_s`, in seconds of the wall clock.

    They have the handler's folder as HOME, or, with another environment, are still in its group and older
    than its end. A younger member belongs to a group that reused the number.
    """
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError, PermissionError):
            if process.uids().real != os.getuid():
                continue
            is_member = os.getpgid(process.pid) == group and process.create_time() < ended_s
            if is_member or process.environ().get("HOME") == str(folder):
                process.kill()
