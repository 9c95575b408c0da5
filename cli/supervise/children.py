"""The child processes of `up`: each is restarted when it dies."""

import asyncio
import json
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType

from cli.supervise.backoff import Backoff
from cli.supervise.orphans import Orphan, signal_at_parents_end
from rdmacast.aio.groups import cancel_and_discard

logger = logging.getLogger("hypercast.up")

STOP_TIMEOUT_S = 40.0


async def spawn(command: Sequence[str], log: Path, pipe: int) -> asyncio.subprocess.Process:
    """Start a program in a session of its own, with `pipe` as stdin; it ends with this process."""
    piped = pipe == asyncio.subprocess.PIPE
    with log.open("ab") as output:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=pipe,
            stdout=pipe if piped else output,
            stderr=output,
            start_new_session=True,
            preexec_fn=partial(signal_at_parents_end, signal.SIGTERM),
        )


async def start_again(name: str, start: Callable[[], Awaitable[None]], backoff: Backoff) -> Backoff:
    """Call `start` until it raises no OSError, such as out of memory, processes or disk space.

    Returns the backoff for the next restart.
    """
    while True:
        await asyncio.sleep(backoff.wait_s)
        try:
            await start()
        except OSError as exc:
            backoff = backoff.after(0.0)
            logger.error("%s cannot be started: %s; retrying in %.1f s", name, exc, backoff.wait_s)
        else:
            return backoff


class Child:
    """One program, in a session of its own so that Ctrl-C reaches only the supervisor.

    `tidy` is called before each start, while no process of it is running.
    """

    def __init__(
        self, name: str, command: Sequence[str], logs: Path, tidy: Callable[[], None] | None = None
    ) -> None:
        self.name = name
        self._tidy = tidy
        self._command = command
        self._log = logs / f"{name}.log"
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._died = asyncio.Event()

    def __repr__(self) -> str:
        pid = self._process.pid if self._process else None
        return f"<Child {self.name} pid={pid}>"

    @property
    def pids(self) -> set[int]:
        """The processes that this object waits for."""
        return {self._process.pid} if self._process else set()

    @property
    def keeper(self) -> asyncio.Task[None]:
        """The task that restarts the program; it ends only by a fault."""
        assert self._task is not None
        return self._task

    async def __aenter__(self) -> "Child":
        await self._spawn()
        self._task = asyncio.create_task(self._keep())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        await cancel_and_discard(self._task)
        if self._process is not None:
            await stop(self._process)

    async def died(self) -> str:
        """Return the name once the program has died."""
        await self._died.wait()
        return self.name

    async def _spawn(self) -> None:
        if self._tidy is not None:
            self._tidy()
        self._process = await spawn(self._command, self._log, asyncio.subprocess.DEVNULL)

    async def _keep(self) -> None:
        assert self._process is not None
        backoff = Backoff()
        while True:
            began_s = time.monotonic()
            code = await self._process.wait()
            self._died.set()
            backoff = backoff.after(time.monotonic() - began_s, killed=code == -signal.SIGKILL)
            logger.warning("%s ended with %s; restarting in %.1f s", self.name, code, backoff.wait_s)
            backoff = await start_again(self.name, self._spawn, backoff)


async def stop(process: asyncio.subprocess.Process) -> None:
    """Send SIGTERM, and SIGKILL if it does not end in time."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()


class Forked:
    """Programs that one zygote forks after it has imported what all of them need: invokers or gateways.

    `name` is the zygote's, and `arguments` are those of each program. Programs outlive their zygote if this
    process adopts orphans; the next zygote, which needs seconds for its imports, then starts only those
    that die.
    """

    def __init__(
        self, name: str, command: Sequence[str], arguments: Mapping[str, Sequence[str]], logs: Path
    ) -> None:
        self.name = name
        self._command = command
        self._arguments = arguments
        self._logs = logs
        self._zygote: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._began_s: dict[str, float] = {}
        self._backoff: dict[str, Backoff] = {}
        self._forked: dict[str, int] = {}  # children of the zygote
        self._orphans: dict[str, Orphan] = {}  # children of an earlier zygote
        self._requested: set[str] = set()  # requested, and not reported as started yet
        self._restarts: set[asyncio.Task[None]] = set()
        self._dead: str | None = None
        self._died = asyncio.Event()

    @property
    def pids(self) -> set[int]:
        """The processes that this object waits for."""
        return {orphan.pid for orphan in self._orphans.values()} | (
            {self._zygote.pid} if self._zygote else set()
        )

    @property
    def keeper(self) -> asyncio.Task[None]:
        """The task that restarts the programs; it ends only by a fault."""
        assert self._task is not None
        return self._task

    async def __aenter__(self) -> "Forked":
        await self._spawn_zygote()
        self._task = asyncio.create_task(self._keep())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None and self._zygote is not None
        await cancel_and_discard(self._task)
        await asyncio.gather(
            self._stop_zygote(self._zygote), *(stop_orphan(orphan) for orphan in self._orphans.values())
        )

    async def died(self) -> str:
        """Return the name of the first part that died."""
        await self._died.wait()
        assert self._dead is not None
        return self._dead

    async def _stop_zygote(self, zygote: asyncio.subprocess.Process) -> None:
        if zygote.returncode is not None:
            return
        assert zygote.stdin is not None
        zygote.stdin.close()  # it stops its children and ends
        if not self._forked:
            zygote.terminate()  # the same, also during its imports
        try:
            await asyncio.wait_for(zygote.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            await stop(zygote)

    async def _spawn_zygote(self) -> None:
        log = self._logs / f"{self.name}.log"
        self._zygote = await spawn(self._command, log, asyncio.subprocess.PIPE)
        self._requested.clear()  # requests since the last zygote died are lost
        try:
            for fork in self._arguments:
                await self._request(fork)
        except (BrokenPipeError, ConnectionResetError):
            logger.warning("%s died at its start", self.name)

    async def _request(self, fork: str) -> None:
        """Request the start of a program, unless it is running or starting."""
        assert self._zygote is not None and self._zygote.stdin is not None
        if fork in self._forked or fork in self._orphans or fork in self._requested:
            return
        self._began_s[fork] = time.monotonic()
        order = {"id": fork, "argv": list(self._arguments[fork]), "log": str(self._logs / f"{fork}.log")}
        self._zygote.stdin.write(json.dumps({"spawn": order}).encode() + b"\n")
        self._requested.add(fork)
        await self._zygote.stdin.drain()

    async def _keep(self) -> None:
        zygote_backoff = Backoff()
        async with asyncio.TaskGroup() as tasks:
            while True:
                began_s = time.monotonic()
                await self._follow(tasks)
                for restart in self._restarts:  # the next zygote starts all that is missing
                    restart.cancel()
                assert self._zygote is not None
                code = await self._zygote.wait()
                self._note_death(self.name)
                self._adopt(tasks)
                killed = code == -signal.SIGKILL
                zygote_backoff = zygote_backoff.after(time.monotonic() - began_s, killed=killed)
                logger.warning("%s ended with %s; restarting; %s", self.name, code, self._left())
                zygote_backoff = await start_again(self.name, self._spawn_zygote, zygote_backoff)

    async def _follow(self, tasks: asyncio.TaskGroup) -> None:
        """Process the events of the zygote until it ends."""
        assert self._zygote is not None and self._zygote.stdout is not None
        async for line in self._zygote.stdout:
            event = json.loads(line)
            if "spawned" in event:
                self._requested.discard(event["spawned"])
                self._forked[event["spawned"]] = event["pid"]
            elif "exited" in event:
                code = event["code"] if "code" in event else -event["signal"]
                self._requested.discard(event["exited"])
                self._forked.pop(event["exited"], None)
                self._over(tasks, event["exited"], code)
            elif event.get("id"):
                self._requested.discard(event["id"])
                self._restart(tasks, event["id"], f"cannot be started: {event['error']}", 0.0)

    def _adopt(self, tasks: asyncio.TaskGroup) -> None:
        """Adopt the children of a zygote that has ended."""
        for fork, pid in self._forked.items():
            with suppress(ProcessLookupError):  # it ended before the zygote could report it
                self._orphans[fork] = Orphan(pid)
                tasks.create_task(self._outlive(tasks, fork, self._orphans[fork]))
        self._forked.clear()

    def _left(self) -> str:
        names = ", ".join(self._orphans)
        return f"{names} continue" if names else "its children ended with it"

    async def _outlive(self, tasks: asyncio.TaskGroup, fork: str, orphan: Orphan) -> None:
        code = await orphan.ended()
        del self._orphans[fork]
        orphan.close()
        self._over(tasks, fork, code)

    def _over(self, tasks: asyncio.TaskGroup, fork: str, code: int | None) -> None:
        """Restart a program that ended with this code."""
        lived_s = time.monotonic() - self._began_s[fork]
        self._restart(tasks, fork, f"ended with {code}", lived_s, killed=code == -signal.SIGKILL)

    def _restart(
        self, tasks: asyncio.TaskGroup, fork: str, why: str, lived_s: float, *, killed: bool = False
    ) -> None:
        self._note_death(fork)
        backoff = self._backoff.get(fork, Backoff()).after(lived_s, killed=killed)
        self._backoff[fork] = backoff
        logger.warning("%s %s; restarting in %.1f s", fork, why, backoff.wait_s)
        restart = tasks.create_task(self._again(fork, backoff.wait_s))
        self._restarts.add(restart)
        restart.add_done_callback(self._restarts.discard)

    async def _again(self, fork: str, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        try:
            await self._request(fork)
        except (BrokenPipeError, ConnectionResetError):
            logger.warning("%s has ended; %s starts with the next one", self.name, fork)

    def _note_death(self, name: str) -> None:
        if not self._died.is_set():
            self._dead = name
            self._died.set()


async def stop_orphan(orphan: Orphan) -> None:
    """Send SIGTERM, and SIGKILL if it does not end in time."""
    orphan.send(signal.SIGTERM)
    try:
        await asyncio.wait_for(orphan.ended(), STOP_TIMEOUT_S)
    except TimeoutError:
        orphan.send(signal.SIGKILL)
        await orphan.ended()
    orphan.close()
