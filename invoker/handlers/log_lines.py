"""A process's output as lines: bounded in length, the last ones kept."""

from collections import deque
from collections.abc import Callable

MAX_LINE_BYTES = 4096
KEPT_LINES = 50


class LogLines:
    """Splits bytes into lines and hands each to `on_line`; an endless line is cut into pieces."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._rest = b""
        self._last: deque[str] = deque(maxlen=KEPT_LINES)

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        *lines, rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._emit(line)
        while len(rest) > MAX_LINE_BYTES:
            self._emit(rest[:MAX_LINE_BYTES])
            rest = rest[MAX_LINE_BYTES:]
        self._rest = rest

    def end(self) -> None:
        """Emit what came after the last newline."""
        if self._rest:
            self._emit(self._rest)
            self._rest = b""

    def tail(self, count: int) -> list[str]:
        """The last lines, oldest first."""
        return list(self._last)[-count:]

    def _emit(self, line: bytes) -> None:
        text = line[:MAX_LINE_BYTES].decode("utf-8", "replace").rstrip("\r")
        self._last.append(text)
        self._on_line(text)
