"""Child processes that take orders over a Unix socket: nodes of a cast, ranks of a peer.

A Unix socket with a path is reachable from every network namespace, and each end notices at once when the
other one closes.
"""

import selectors
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, TypeVar

from benchmarks.harness.crew_messages import CrewMessage, CrewProtocol, MemberHello, OrderFailed, encode
from benchmarks.harness.processes import Processes, module

R = TypeVar("R", bound=CrewMessage)
Process = subprocess.Popen[Any]
# Starts the processes of a crew one after another, given the crew's socket and a file for their output.
Start = Callable[[Path, IO[bytes]], Iterable[Process]]
_CHUNK = 1 << 16
_END_S = 10.0  # until a child whose connection was closed is killed


class CrewError(Exception):
    """A child process ended, failed or does not reply."""


class CrewMember:
    """The connection to one child process; blocks its thread."""

    def __init__(self, connected: socket.socket, protocol: CrewProtocol, patience_s: float) -> None:
        """Read the child's hello. Raises CrewError."""
        self.socket = connected
        self._protocol = protocol
        self._received = b""
        self.hello = self.reply_of(MemberHello, patience_s)

    def __repr__(self) -> str:
        return f"CrewMember(rank {self.hello.rank})"

    def ask(self, order: CrewMessage, expected: type[R], patience_s: float) -> R:
        """Send an order and return its reply. Raises CrewError."""
        self.send(order)
        return self.reply_of(expected, patience_s)

    def send(self, order: CrewMessage) -> None:
        """Send an order. Raises CrewError."""
        try:
            self.socket.sendall(encode(order) + b"\n")
        except OSError as error:
            raise CrewError(f"the process has ended: {error}") from error

    def reply_of(self, expected: type[R], patience_s: float) -> R:
        """Return the next reply. Raises CrewError, also for a reply of another kind."""
        reply = self._protocol.decode_reply(self._line(time.monotonic() + patience_s, patience_s))
        if isinstance(reply, expected):
            return reply
        raise CrewError(reply.reason if isinstance(reply, OrderFailed) else f"unexpected reply {reply}")

    def _line(self, deadline_s: float, patience_s: float) -> bytes:
        while b"\n" not in self._received:
            self.socket.settimeout(max(0.001, deadline_s - time.monotonic()))
            try:
                chunk = self.socket.recv(_CHUNK)
            except TimeoutError:
                raise CrewError(f"no reply after {patience_s:g} s") from None
            except OSError as error:
                raise CrewError(f"the connection failed: {error}") from error
            if not chunk:
                raise CrewError("the process ended")
            self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        return line

    def close(self) -> None:
        """Close the connection; the process then ends. Idempotent."""
        self.socket.close()


class CrewListener:
    """The socket at which child processes connect; start them after this was made."""

    def __init__(self, path: Path, protocol: CrewProtocol, size: int) -> None:
        self.path = path
        self._protocol = protocol
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen(size)

    def accept(self, processes: Sequence[Process], deadline_s: float) -> CrewMember | None:
        """Return the next child that connects, or None at the deadline.

        Raises CrewError if one of `processes` ends before.
        """
        self._socket.settimeout(0.2)
        while time.monotonic() < deadline_s:
            ended = [process.poll() for process in processes if process.poll() is not None]
            if ended:
                raise CrewError(f"a process ended with {ended[0]} before it was ready")
            try:
                connected = self._socket.accept()[0]
            except TimeoutError:
                continue
            return CrewMember(connected, self._protocol, deadline_s - time.monotonic())
        return None

    def close(self) -> None:
        """Remove the socket. Idempotent."""
        self._socket.close()
        self.path.unlink(missing_ok=True)


class Crew:
    """Child processes that take orders together; start them after this was made, then call `gather`."""

    def __init__(self, name: str, path: Path, protocol: CrewProtocol, size: int) -> None:
        self._name = name
        self._size = size
        self._members: list[CrewMember] = []
        self._listener = CrewListener(path, protocol, size)

    def __repr__(self) -> str:
        return f"Crew({self._name}: {len(self._members)} of {self._size} connected)"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections; every process then ends. Idempotent."""
        self._listener.close()
        for member in self._members:
            member.close()

    @property
    def hellos(self) -> tuple[MemberHello, ...]:
        """The hellos by rank, after `gather`."""
        return tuple(member.hello for member in self._members)

    def gather(self, processes: Sequence[Process], patience_s: float) -> None:
        """Wait until all have connected. Raises CrewError if one of `processes` ends before, or in time."""
        deadline_s = time.monotonic() + patience_s
        there: dict[int, CrewMember] = {}
        while len(there) < self._size:
            try:
                member = self._listener.accept(processes, deadline_s)
            except CrewError as error:
                raise CrewError(f"{self._name}: {error}") from error
            if member is None:
                raise CrewError(
                    f"{self._name}: {len(there)} of {self._size} connected after {patience_s:g} s"
                )
            if member.hello.rank in there:
                raise CrewError(f"{self._name}: two processes have rank {member.hello.rank}")
            there[member.hello.rank] = member
        self._members = [there[rank] for rank in sorted(there)]

    def send(self, order: CrewMessage, ranks: Sequence[int] | None = None) -> None:
        """Send an order to these ranks (default: all). Raises CrewError."""
        for rank in range(self._size) if ranks is None else ranks:
            self._members[rank].send(order)

    def ask(self, order: CrewMessage, expected: type[R], patience_s: float) -> list[R]:
        """Send an order to all, and return their replies by rank. Raises CrewError."""
        self.send(order)
        return self.replies(range(self._size), expected, patience_s)

    def replies(self, ranks: Sequence[int], expected: type[R], patience_s: float) -> list[R]:
        """Return the replies of these ranks to their orders, in that order. Raises CrewError."""
        deadline_s = time.monotonic() + patience_s
        found: dict[int, R] = {}
        with selectors.DefaultSelector() as waiting:
            for rank in ranks:
                waiting.register(self._members[rank].socket, selectors.EVENT_READ, rank)
            while len(found) < len(ranks):
                ready = waiting.select(max(0.0, deadline_s - time.monotonic()))
                if not ready:
                    missing = sorted(set(ranks) - set(found))
                    raise CrewError(f"{self._name}: no reply of ranks {missing} after {patience_s:g} s")
                for key, _ in ready:
                    rank = key.data
                    try:
                        found[rank] = self._members[rank].reply_of(expected, deadline_s - time.monotonic())
                    except CrewError as error:
                        raise CrewError(f"{self._name}: rank {rank}: {error}") from error
                    waiting.unregister(key.fileobj)
        return [found[rank] for rank in ranks]


@contextmanager
def running_crew(
    name: str,
    folder: Path,
    protocol: CrewProtocol,
    size: int,
    start: Start,
    stop: Callable[[Process], None],
    patience_s: float,
) -> Iterator[Crew]:
    """Run a crew with all its processes connected; they end with the block. Raises CrewError."""
    path = folder / f"{name}.socket"
    with Crew(name, path, protocol, size) as crew, (folder / f"{name}.log").open("wb") as log:
        processes: list[Process] = []
        try:
            processes.extend(start(path, log))  # one by one, so that a failure stops those before
            crew.gather(processes, patience_s)
            yield crew
        finally:
            crew.close()
            for process in processes:
                stop(process)


@contextmanager
def running_children(
    name: str, protocol: CrewProtocol, *members: Sequence[object], patience_s: float = 60.0
) -> Iterator[Crew]:
    """Run a crew of `python -m NAME SOCKET RANK ARGUMENTS...`, one child per sequence of arguments.

    A child ends by itself when its connection is closed. Raises CrewError.
    """
    with tempfile.TemporaryDirectory(prefix="hypercast-crew-") as folder, Processes() as processes:

        def start(socket: Path, log: IO[bytes]) -> Iterator[Process]:
            for rank, arguments in enumerate(members):
                yield processes.start(module(name, socket, rank, *arguments))

        stop = partial(processes.join, patience_s=_END_S)
        args = (name, Path(folder), protocol, len(members), start, stop, patience_s)
        with running_crew(*args) as crew:
            yield crew
