"""Processes that take orders together over a Unix socket: the nodes of a cast, or the ranks of a peer.

A Unix socket with a path is reached from every network namespace, and its end tells each side at once
that the other is gone.
"""

import selectors
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, TypeVar

from benchmarks.crew_messages import Answer, Failed, Hello, Order, decode_answer, encode

A = TypeVar("A", bound=Answer)
Process = subprocess.Popen[Any]
# Starts the processes of a crew one after the other, given the crew's socket and a file for what they print.
Start = Callable[[Path, IO[bytes]], Iterable[Process]]
_CHUNK = 1 << 16


class CrewError(Exception):
    """A process of a crew ended, failed or does not answer."""


class Crew:
    """Start the processes after this has begun to listen, then wait for `gathered`."""

    def __init__(self, name: str, path: Path, size: int) -> None:
        self._name = name
        self._path = path
        self._size = size
        self._members: list[_Line] = []
        self.hellos: tuple[Hello, ...] = ()  # by rank, once all are there
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(size)

    def __repr__(self) -> str:
        return f"Crew({self._name}: {len(self._members)} of {self._size} there)"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hang up; every process then ends by itself. Idempotent."""
        self._listener.close()
        self._path.unlink(missing_ok=True)
        for member in self._members:
            member.close()

    def gather(self, processes: Sequence[Process], patience_s: float) -> None:
        """Wait until all have said hello. Raises CrewError if one of `processes` ends before, or in time."""
        deadline_s = time.monotonic() + patience_s
        there: dict[int, _Line] = {}
        hellos: dict[int, Hello] = {}
        self._listener.settimeout(0.2)
        while len(there) < self._size:
            ended = [process.poll() for process in processes if process.poll() is not None]
            if ended:
                raise CrewError(f"{self._name}: a process ended with {ended[0]} before it was ready")
            if time.monotonic() > deadline_s:
                raise CrewError(f"{self._name}: {len(there)} of {self._size} there after {patience_s:g} s")
            try:
                line = _Line(self._listener.accept()[0])
            except TimeoutError:
                continue
            hello = line.read(deadline_s - time.monotonic())
            if not isinstance(hello, Hello) or hello.rank in there:
                raise CrewError(f"{self._name}: not a hello of its own: {hello}")
            there[hello.rank], hellos[hello.rank] = line, hello
        self._members = [there[rank] for rank in sorted(there)]
        self.hellos = tuple(hellos[rank] for rank in sorted(hellos))

    def tell(self, order: Order, ranks: Sequence[int] | None = None) -> None:
        """To these, or to all. Raises CrewError."""
        for rank in range(self._size) if ranks is None else ranks:
            self._members[rank].send(order)

    def ask(self, order: Order, expected: type[A], patience_s: float) -> list[A]:
        """The answers of all, by rank. Raises CrewError."""
        self.tell(order)
        return self.hear(range(self._size), expected, patience_s)

    def hear(self, ranks: Sequence[int], expected: type[A], patience_s: float) -> list[A]:
        """The answers of these, in their order, to what they were told. Raises CrewError."""
        deadline_s = time.monotonic() + patience_s
        found: dict[int, A] = {}
        with selectors.DefaultSelector() as waiting:
            for rank in ranks:
                waiting.register(self._members[rank].socket, selectors.EVENT_READ, rank)
            while len(found) < len(ranks):
                ready = waiting.select(max(0.0, deadline_s - time.monotonic()))
                if not ready:
                    missing = sorted(set(ranks) - set(found))
                    raise CrewError(f"{self._name}: no answer of {missing} after {patience_s:g} s")
                for key, _ in ready:
                    found[key.data] = self._expect(key.data, expected, deadline_s - time.monotonic())
                    waiting.unregister(key.fileobj)
        return [found[rank] for rank in ranks]

    def _expect(self, rank: int, expected: type[A], patience_s: float) -> A:
        answer = self._members[rank].read(patience_s)
        if isinstance(answer, expected):
            return answer
        reason = answer.reason if isinstance(answer, Failed) else f"it answered {answer}"
        raise CrewError(f"{self._name}: rank {rank}: {reason}")


class _Line:
    """A connection that carries one message a line."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._received = b""

    def send(self, order: Order) -> None:
        try:
            self.socket.sendall(encode(order) + b"\n")
        except OSError as error:
            raise CrewError(f"a process is gone: {error}") from error

    def read(self, patience_s: float) -> Answer:
        self.socket.settimeout(max(0.001, patience_s))
        while b"\n" not in self._received:
            try:
                chunk = self.socket.recv(_CHUNK)
            except OSError as error:
                raise CrewError(f"a process does not answer: {error}") from error
            if not chunk:
                raise CrewError("a process ended")
            self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        return decode_answer(line)

    def close(self) -> None:
        self.socket.close()


@contextmanager
def crewed(
    name: str, folder: Path, size: int, start: Start, stop: Callable[[Process], None], patience_s: float
) -> Iterator[Crew]:
    """A crew whose processes are there; they end with it. Raises CrewError."""
    path = folder / f"{name}.socket"
    with Crew(name, path, size) as crew, (folder / f"{name}.log").open("wb") as log:
        processes: list[Process] = []
        try:
            processes.extend(start(path, log))  # one by one: of a failure, those before are stopped
            crew.gather(processes, patience_s)
            yield crew
        finally:
            crew.close()
            for process in processes:
                stop(process)
