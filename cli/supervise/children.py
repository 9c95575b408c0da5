"""The child processes of `up`: each is started again when it dies."""

import asyncio
import ctypes
import json
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from cli.backoff import Backoff
from cli.orphans import Orphan

logger = logging.getLogger("hypercast.up")

STOP_TIMEOUT_S = 40.0
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def end_with_parent() -> None:
    """In the child: get SIGTERM when the supervisor is gone, however it went."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


async def start_again(name: str, start: Callable[[], Awaitable[None]], backoff: Backoff) -> Backoff:
    """Call `start` until no OSError comes of it, as when memory, processes or disk have run out for now.

    Returns how long the next wait is.
    """
    while True:
        await asyncio.sleep(backoff.wait_s)
        try:
            await start()
        except OSError as exc:
            backoff = backoff.after(0.0)
            logger.error("%s cannot be started: %s; trying again in %.1f s", name, exc, backoff.wait_s)
        else:
            return backoff


class Child:
    """One program, in a session of its own so that Ctrl-C reaches the supervisor alone.

    `tidy` is called before each start, when no process of it runs.
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
        """The processes that this waits for."""
        return {self._process.pid} if self._process else set()

    @property
    def keeper(self) -> asyncio.Task[None]:
        """The task that starts it again: it ends only by a fault."""
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
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._process is not None:
            await stop(self._process)

    async def died(self) -> str:
        """Return the name once the program has died."""
        await self._died.wait()
        return self.name

    async def _spawn(self) -> None:
        if self._tidy is not None:
            self._tidy()
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    async def _keep(self) -> None:
        assert self._process is not None
        backoff = Backoff()
        while True:
            began_s = time.monotonic()
            code = await self._process.wait()
            self._died.set()
            backoff = backoff.after(time.monotonic() - began_s, killed=code == -signal.SIGKILL)
            logger.warning("%s ended with %s; starting again in %.1f s", self.name, code, backoff.wait_s)
            backoff = await start_again(self.name, self._spawn, backoff)


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


class Forked:
    """Programs that one zygote forks, which has imported once what all of them need: the invokers, of which
    that is torch, or the gateways.

    `name` is the zygote's, and `arguments` are those of each program. They outlive the zygote where this
    process takes orphans: then the next zygote, which needs seconds for its imports, starts only those that
    die.
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
        self._forked: dict[str, int] = {}  # what the zygote runs
        self._orphans: dict[str, Orphan] = {}  # what an earlier one left
        self._asked: set[str] = set()  # what it has been asked for and not told of yet
        self._restarts: set[asyncio.Task[None]] = set()
        self._dead: str | None = None
        self._died = asyncio.Event()

    @property
    def pids(self) -> set[int]:
        """The processes that this waits for."""
        return {orphan.pid for orphan in self._orphans.values()} | (
            {self._zygote.pid} if self._zygote else set()
        )

    @property
    def keeper(self) -> asyncio.Task[None]:
        """The task that starts them again: it ends only by a fault."""
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
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
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
        zygote.stdin.close()  # its word to stop the nodes and end
        if not self._forked:
            zygote.terminate()  # the same word, which it hears while it imports, too
        try:
            await asyncio.wait_for(zygote.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            await stop(zygote)

    async def _spawn_zygote(self) -> None:
        with (self._logs / f"{self.name}.log").open("ab") as log:
            self._zygote = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        self._asked.clear()  # what was asked since the last one died, nobody has heard
        try:
            for fork in self._arguments:
                await self._ask(fork)
        except (BrokenPipeError, ConnectionResetError):
            logger.warning("the %s died at its start", self.name)

    async def _ask(self, fork: str) -> None:
        """Have it started, unless it runs or is being started."""
        assert self._zygote is not None and self._zygote.stdin is not None
        if fork in self._forked or fork in self._orphans or fork in self._asked:
            return
        self._began_s[fork] = time.monotonic()
        order = {"id": fork, "argv": list(self._arguments[fork]), "log": str(self._logs / f"{fork}.log")}
        self._zygote.stdin.write(json.dumps({"spawn": order}).encode() + b"\n")
        self._asked.add(fork)
        await self._zygote.stdin.drain()

    async def _keep(self) -> None:
        zygote_backoff = Backoff()
        async with asyncio.TaskGroup() as tasks:
            while True:
                began_s = time.monotonic()
                await self._follow(tasks)
                for restart in self._restarts:  # the next zygote starts all that is not there
                    restart.cancel()
                assert self._zygote is not None
                code = await self._zygote.wait()
                self._note_death(self.name)
                self._adopt(tasks)
                killed = code == -signal.SIGKILL
                zygote_backoff = zygote_backoff.after(time.monotonic() - began_s, killed=killed)
                logger.warning("%s ended with %s; starting again; %s", self.name, code, self._left())
                zygote_backoff = await start_again(self.name, self._spawn_zygote, zygote_backoff)

    async def _follow(self, tasks: asyncio.TaskGroup) -> None:
        """Read what the zygote says until it is gone."""
        assert self._zygote is not None and self._zygote.stdout is not None
        async for line in self._zygote.stdout:
            event = json.loads(line)
            if "spawned" in event:
                self._asked.discard(event["spawned"])
                self._forked[event["spawned"]] = event["pid"]
            elif "exited" in event:
                code = event["code"] if "code" in event else -event["signal"]
                self._asked.discard(event["exited"])
                self._forked.pop(event["exited"], None)
                self._over(tasks, event["exited"], code)
            elif event.get("id"):
                self._asked.discard(event["id"])
                self._restart(tasks, event["id"], f"cannot be started: {event['error']}", 0.0)

    def _adopt(self, tasks: asyncio.TaskGroup) -> None:
        """Watch over what a zygote that is gone has left."""
        for fork, pid in self._forked.items():
            with suppress(ProcessLookupError):  # it ended, and the zygote had no time to say so
                self._orphans[fork] = Orphan(pid)
                tasks.create_task(self._outlive(tasks, fork, self._orphans[fork]))
        self._forked.clear()

    def _left(self) -> str:
        names = ", ".join(self._orphans)
        return f"{names} run on" if names else "what it had forked went with it"

    async def _outlive(self, tasks: asyncio.TaskGroup, fork: str, orphan: Orphan) -> None:
        code = await orphan.ended()
        del self._orphans[fork]
        orphan.close()
        self._over(tasks, fork, code)

    def _over(self, tasks: asyncio.TaskGroup, fork: str, code: int | None) -> None:
        """Start one again that ended with this code."""
        lived_s = time.monotonic() - self._began_s[fork]
        self._restart(tasks, fork, f"ended with {code}", lived_s, killed=code == -signal.SIGKILL)

    def _restart(
        self, tasks: asyncio.TaskGroup, fork: str, why: str, lived_s: float, *, killed: bool = False
    ) -> None:
        self._note_death(fork)
        backoff = self._backoff.get(fork, Backoff()).after(lived_s, killed=killed)
        self._backoff[fork] = backoff
        logger.warning("%s %s; starting again in %.1f s", fork, why, backoff.wait_s)
        restart = tasks.create_task(self._again(fork, backoff.wait_s))
        self._restarts.add(restart)
        restart.add_done_callback(self._restarts.discard)

    async def _again(self, fork: str, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        try:
            await self._ask(fork)
        except (BrokenPipeError, ConnectionResetError):
            logger.warning("the %s is gone; %s starts with the next one", self.name, fork)

    def _note_death(self, name: str) -> None:
        if not self._died.is_set():
            self._dead = name
            self._died.set()


async def stop_orphan(orphan: Orphan) -> None:
    """SIGTERM, and SIGKILL if that does not help."""
    orphan.send(signal.SIGTERM)
    try:
        await asyncio.wait_for(orphan.ended(), STOP_TIMEOUT_S)
    except TimeoutError:
        orphan.send(signal.SIGKILL)
        await orphan.ended()
    orphan.close()
