"""The processes of a benchmark of faults: nodes that live from cast to cast, and one in reserve.

Where a node is killed, that one takes its place at once: starting a process would take the processor
from the others, whose time is measured.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self, TypeVar

from benchmarks.cast_faults_messages import (
    Answer,
    Count,
    Counted,
    Failed,
    Order,
    Serve,
    Serving,
    decode_answer,
    encode,
)
from benchmarks.cast_faults_node import SETTLES_S
from benchmarks.crew import CrewError
from benchmarks.machine import ROOT
from benchmarks.processes import module

A = TypeVar("A", bound=Answer)
ORDER_S = 60.0
_LOOK_S = 0.05
_LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Belongings:
    """What a node's process has: open files by kind, mapped images, regions and tasks."""

    files: Mapping[str, int]
    mapped: int
    regions: tuple[str, ...]
    tasks: int

    def more_than(self, before: "Belongings") -> str:
        """What there is now and was not, in words; "" if nothing."""
        more = [f"{count} x {kind}" for kind, count in (Counter(self.files) - Counter(before.files)).items()]
        more += [f"region {name}" for name in self.regions]
        more += [f"{self.mapped} mapped images"] if self.mapped > before.mapped else []
        more += [f"{self.tasks - before.tasks} tasks"] if self.tasks > before.tasks else []
        return ", ".join(more)


class FaultyProcess:
    """One node. `fresh` is what its process had before its first cast."""

    def __init__(self, process: asyncio.subprocess.Process, images: Path) -> None:
        self._process = process
        self._images = images
        self.url = ""
        self.fresh: Belongings | None = None

    def __repr__(self) -> str:
        return f"FaultyProcess({self._process.pid} at {self.url or 'no place yet'})"

    @classmethod
    async def start(cls, log: IO[bytes], images: Path) -> Self:
        process = await asyncio.create_subprocess_exec(
            *module("benchmarks.cast_faults_node"),
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            limit=_LINE_BYTES,
            start_new_session=True,  # Ctrl-C reaches only us, who then end it
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        return cls(process, images)

    async def serve(self, url: str, rate_bytes_s: float) -> None:
        """Raises CrewError."""
        self.url = (await self.ask(Serve(url=url, rate_bytes_s=rate_bytes_s), Serving)).url
        self.fresh = await self.belongings()

    async def ask(self, order: Order, expected: type[A], patience_s: float = ORDER_S) -> A:
        """Raises CrewError."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(encode(order) + b"\n")
        try:
            async with asyncio.timeout(patience_s):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise CrewError(f"no answer to {type(order).__name__} after {patience_s:g} s") from None
        if not line:
            raise CrewError(f"it ended with {await self._process.wait()}")
        answer = decode_answer(line)
        if not isinstance(answer, expected):
            raise CrewError(answer.reason if isinstance(answer, Failed) else f"it answered {answer}")
        return answer

    async def belongings(self) -> Belongings:
        counted = await self.ask(Count(), Counted)
        home = Path(f"/proc/{self._process.pid}")
        files = Counter[str]()
        for link in (home / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                files[_kind(str(link.readlink()))] += 1
        mapped = (home / "maps").read_text().count(str(self._images))
        return Belongings(files=files, mapped=mapped, regions=tuple(counted.regions), tasks=counted.tasks)

    async def leaked(self) -> str:
        """What it has more than at first, once it has had time to close it; "" for nothing."""
        assert self.fresh is not None
        deadline_s = time.monotonic() + SETTLES_S
        while True:
            more = (await self.belongings()).more_than(self.fresh)
            if not more or time.monotonic() > deadline_s:
                return more
            await asyncio.sleep(_LOOK_S)

    def stop(self) -> None:
        """It hears and says nothing more, though its connections stay open."""
        self._process.send_signal(signal.SIGSTOP)

    async def kill(self) -> None:
        """It is gone when this returns. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


class Fleet:
    """`nodes` nodes at addresses of their own on the loopback device, by rank."""

    def __init__(self, nodes: int, rate_bytes_s: float, images: Path, log: IO[bytes]) -> None:
        self._size = nodes
        self._rate_bytes_s = rate_bytes_s
        self._images = images
        self._log = log
        self._all: list[FaultyProcess] = []
        self._spare: FaultyProcess | None = None
        self.nodes: list[FaultyProcess] = []

    def __repr__(self) -> str:
        return f"Fleet({len(self.nodes)} of {self._size} nodes)"

    async def __aenter__(self) -> Self:
        """Raises CrewError."""
        try:
            started = [await self._start() for _ in range(self._size)]
            for rank, node in enumerate(started):
                await node.serve(_place(rank), self._rate_bytes_s)
            self.nodes = started
            await self.have_spare()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Kill all processes. Idempotent."""
        for process in self._all:
            await process.kill()
        self._all.clear()

    async def have_spare(self) -> None:
        """Raises CrewError."""
        if self._spare is None:
            self._spare = await self._start()
            await self._spare.ask(Count(), Counted)  # so that it has started

    async def replace(self, rank: int, *, same_place: bool = False) -> FaultyProcess:
        """Give the place of a killed node to the spare one, its very address if asked. Raises CrewError."""
        killed, spare = self.nodes[rank], self._spare
        assert spare is not None
        self._spare = None
        self._all.remove(killed)
        self.nodes[rank] = spare
        await spare.serve(killed.url if same_place else _place(rank), self._rate_bytes_s)
        return spare

    async def _start(self) -> FaultyProcess:
        process = await FaultyProcess.start(self._log, self._images)
        self._all.append(process)
        return process


def _place(rank: int) -> str:
    """Of its own, so that no connection of another takes the port of a node that is to come back."""
    return f"tcp://127.77.0.{rank + 1}:0"


def _kind(target: str) -> str:
    return target.partition(":")[0] if target.startswith(("socket:", "pipe:", "anon_inode:")) else target
