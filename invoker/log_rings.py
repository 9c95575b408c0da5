"""Recent log lines of each function on this node, with followers."""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator

from registry.clock import Clock

MAX_LINES = 1000
MAX_FUNCTIONS = 256
MAX_LINE_CHARACTERS = 2000
_FOLLOWER_BACKLOG = 1000


class LogRings:
    """Ring buffers of log lines by function, bounded in lines, line length and functions (LRU).

    Belongs to the event loop's thread.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rings: OrderedDict[str, deque[str]] = OrderedDict()
        self._followers: dict[str, set[asyncio.Queue[str]]] = {}
        self._second = 0
        self._second_text = ""

    def __repr__(self) -> str:
        return f"<LogRings {len(self._rings)} functions>"

    def add(self, function: str, text: str) -> None:
        """Append lines with timestamps; a slow follower loses lines."""
        stamp = self._stamp(self._clock.wall_s())
        ring = self._rings.setdefault(function, deque(maxlen=MAX_LINES))
        self._rings.move_to_end(function)
        if len(self._rings) > MAX_FUNCTIONS:
            self._rings.popitem(last=False)
        # Only \n separates lines, not other Unicode line ends; at most MAX_LINES are kept.
        for raw in text.removesuffix("\n").rsplit("\n", MAX_LINES)[-MAX_LINES:]:
            line = f"{stamp} {raw[:MAX_LINE_CHARACTERS]}"
            ring.append(line)
            for follower in self._followers.get(function, ()):
                if not follower.full():
                    follower.put_nowait(line)

    def _stamp(self, moment_s: float) -> str:
        second = int(moment_s)
        if second != self._second:  # formatting is the most expensive part of a line
            self._second = second
            self._second_text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return f"{self._second_text}.{int(moment_s * 1000) % 1000:03d}Z"

    def tail(self, function: str, lines: int) -> tuple[str, ...]:
        """Return the last `lines` lines, oldest first."""
        ring = self._rings.get(function, deque())
        return tuple(ring)[-lines:] if lines > 0 else ()

    async def follow(self, function: str, lines: int) -> AsyncIterator[tuple[str, ...]]:
        """Yield the last `lines` lines, then new ones in batches, until closed."""
        queue: asyncio.Queue[str] = asyncio.Queue(_FOLLOWER_BACKLOG)
        followers = self._followers.setdefault(function, set())
        followers.add(queue)
        try:
            if past := self.tail(function, lines):
                yield past
            while True:
                batch = [await queue.get()]
                while not queue.empty():
                    batch.append(queue.get_nowait())
                yield tuple(batch)
        finally:
            followers.discard(queue)
            if not followers:
                self._followers.pop(function, None)
