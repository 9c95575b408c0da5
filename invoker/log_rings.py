"""Recent log lines of each function on this node, with followers."""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass

from registry.clock import Clock

MAX_LINES = 1000
MAX_FUNCTIONS = 256
MAX_LINE_CHARACTERS = 2000
STAMP = len("2023-11-14T22:13:20.000Z")  # with which each line begins
_FOLLOWER_BACKLOG = 1000

_Line = tuple[int, str]


@dataclass(frozen=True, slots=True)
class LoggedLine:
    """A line of a function's log, with its time."""

    function: str
    version: int
    text: str


class LogRings:
    """Ring buffers of log lines by function, bounded in lines, line length and functions (LRU).

    Each line has the version that wrote it: another tenant can take a deleted function's name, and its
    versions have higher numbers.

    `written` is called with the lines of each `add`. Belongs to the event loop's thread.
    """

    def __init__(self, clock: Clock, written: Callable[[Iterable[LoggedLine]], None] | None = None) -> None:
        self._clock = clock
        self._written = written
        self._rings: OrderedDict[str, deque[_Line]] = OrderedDict()
        self._followers: dict[str, set[asyncio.Queue[_Line]]] = {}
        self._second = 0
        self._second_text = ""

    def __repr__(self) -> str:
        return f"<LogRings {len(self._rings)} functions>"

    def add(self, function: str, version: int, text: str) -> None:
        """Append lines with timestamps; a slow follower loses lines."""
        stamp = self._stamp(self._clock.wall_s())
        # Only \n separates lines, not other Unicode line ends; at most MAX_LINES are kept.
        raw = text.removesuffix("\n").rsplit("\n", MAX_LINES)[-MAX_LINES:]
        self._append(function, ((version, f"{stamp} {line[:MAX_LINE_CHARACTERS]}") for line in raw))

    def recover(self, lines: Iterable[LoggedLine]) -> None:
        """Append lines that have their time already, of a process which was killed."""
        for line in lines:
            self._append(line.function, ((line.version, line.text),))

    def _append(self, function: str, lines: Iterable[_Line]) -> None:
        ring = self._rings.setdefault(function, deque(maxlen=MAX_LINES))
        self._rings.move_to_end(function)
        if len(self._rings) > MAX_FUNCTIONS:
            self._rings.popitem(last=False)
        for line in lines:
            ring.append(line)
            if self._written is not None:
                self._written((LoggedLine(function, *line),))
            for follower in self._followers.get(function, ()):
                if not follower.full():
                    follower.put_nowait(line)

    def _stamp(self, moment_s: float) -> str:
        second = int(moment_s)
        if second != self._second:  # formatting is the most expensive part of a line
            self._second = second
            self._second_text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return f"{self._second_text}.{int(moment_s * 1000) % 1000:03d}Z"

    def tail(self, function: str, lines: int, since: int = 0) -> tuple[str, ...]:
        """Return the last `lines` lines of the versions from `since` on, oldest first."""
        found = [text for version, text in self._rings.get(function, ()) if version >= since]
        return tuple(found[-lines:]) if lines > 0 else ()

    async def follow(self, function: str, lines: int, since: int = 0) -> AsyncIterator[tuple[str, ...]]:
        """Yield the last `lines` lines of versions from `since` on, then new ones, until closed."""
        queue: asyncio.Queue[_Line] = asyncio.Queue(_FOLLOWER_BACKLOG)
        followers = self._followers.setdefault(function, set())
        followers.add(queue)
        try:
            if past := self.tail(function, lines, since):
                yield past
            while True:
                batch = [await queue.get()]
                while not queue.empty():
                    batch.append(queue.get_nowait())
                if fresh := tuple(text for version, text in batch if version >= since):
                    yield fresh
        finally:
            followers.discard(queue)
            if not followers:
                self._followers.pop(function, None)
