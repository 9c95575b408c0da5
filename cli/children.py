"""The child processes of `up`: each is started again when it dies."""

import asyncio
import ctypes
import json
import logging
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from cli.backoff import Backoff

logger = logging.getLogger("hypercast.up")

STOP_TIMEOUT_S = 40.0
STARTED_S = 5.0  # a child that dies sooner than this after its first start has failed to start
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def end_with_parent() -> None:
    """In the child: get SIGTERM when the supervisor is gone, however it went."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Child:
    """One program, in a session of its own so that Ctrl-C reaches the supervisor alone."""

    def __init__(self, name: str, command: Sequence[str], logs: Path) -> None:
        self.name = name
        self._command = command
        self._log = logs / f"{name}.log"
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._died = asyncio.Event()

    def __repr__(self) -> str:
        pid = self._process.pid if self._process else None
        return f"<Child {self.name} pid={pid}>"

    async def __aenter__(self) -> "Child":
        self._process = await self._spawn()
        self._task = asyncio.create_task(self._keep())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._process is not None:
            await stop(self._process)

    async def died(self) -> str:
        """Return the name once the program has died within its first seconds."""
        await self._died.wait()
        return self.name

    async def _spawn(self) -> asyncio.subprocess.Process:
        with self._log.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    async def _keep(self) -> None:
        assert self._process is not None
        backoff, first_s = Backoff(), time.monotonic()
        while True:
            began_s = time.monotonic()
            code = await self._process.wait()
            if time.monotonic() - first_s < STARTED_S:
                self._died.set()
            backoff = backoff.after(time.monotonic() - began_s)
            logger.warning("%s ended with %s; starting again in %.1f s", self.name, code, backoff.wait_s)
            await asyncio.sleep(backoff.wait_s)
            self._process = await self._spawn()


async def stop(process: asyncio.subprocess.Process) -> None:
    """SIGTERM, and SIGKILL if that does not help."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()


class Nodes:
    """The invokers, forked by one zygote that has imported torch once for all of them."""

    name = "zygote"

    def __init__(self, arguments: Mapping[str, Sequence[str]], logs: Path) -> None:
        self._arguments = arguments
        self._logs = logs
        self._zygote: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._began_s: dict[str, float] = {}
        self._backoff: dict[str, Backoff] = {}
        self._dead: str | None = None
        self._died = asyncio.Event()

    async def __aenter__(self) -> "Nodes":
        await self._spawn_zygote()
        self._task = asyncio.create_task(self._keep())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None and self._zygote is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._zygote.returncode is None:
            assert self._zygote.stdin is not None
            self._zygote.stdin.close()  # its word to stop the nodes and end
            try:
                await asyncio.wait_for(self._zygote.wait(), STOP_TIMEOUT_S)
            except TimeoutError:
                await stop(self._zygote)

    async def died(self) -> str:
        """Return the name of the first part that died within its first seconds."""
        await self._died.wait()
        assert self._dead is not None
        return self._dead

    async def _spawn_zygote(self) -> None:
        with (self._logs / "zygote.log").open("ab") as log:
            self._zygote = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "invoker.zygote"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        for node in self._arguments:
            await self._ask(node)

    async def _ask(self, node: str) -> None:
        assert self._zygote is not None and self._zygote.stdin is not None
        self._began_s[node] = time.monotonic()
        order = {"id": node, "argv": list(self._arguments[node]), "log": str(self._logs / f"{node}.log")}
        self._zygote.stdin.write(json.dumps({"spawn": order}).encode() + b"\n")
        await self._zygote.stdin.drain()

    async def _keep(self) -> None:
        zygote_backoff = Backoff()
        while True:
            began_s = time.monotonic()
            async with asyncio.TaskGroup() as restarts:
                await self._follow(restarts)
            assert self._zygote is not None
            code = await self._zygote.wait()
            self._note_death("zygote", time.monotonic() - began_s)
            zygote_backoff = zygote_backoff.after(time.monotonic() - began_s)
            logger.warning("zygote ended with %s, and the nodes with it; starting again", code)
            await asyncio.sleep(zygote_backoff.wait_s)
            await self._spawn_zygote()

    async def _follow(self, restarts: asyncio.TaskGroup) -> None:
        """Read what the zygote says until it is gone."""
        assert self._zygote is not None and self._zygote.stdout is not None
        async for line in self._zygote.stdout:
            event = json.loads(line)
            if "exited" not in event:
                continue
            node = event["exited"]
            lived_s = time.monotonic() - self._began_s[node]
            self._note_death(node, lived_s)
            backoff = self._backoff.get(node, Backoff()).after(lived_s)
            self._backoff[node] = backoff
            how = event.get("signal") or event.get("code")
            logger.warning("%s ended with %s; starting again in %.1f s", node, how, backoff.wait_s)
            restarts.create_task(self._again(node, backoff.wait_s))

    async def _again(self, node: str, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        try:
            await self._ask(node)
        except (BrokenPipeError, ConnectionResetError):
            logger.warning("the zygote is gone; %s starts with the next one", node)

    def _note_death(self, name: str, lived_s: float) -> None:
        if lived_s < STARTED_S and not self._died.is_set():
            self._dead = name
            self._died.set()
