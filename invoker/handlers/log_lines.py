"""A process's output as lines: bounded in length and in number a second, the last ones kept."""

import time
from collections import deque
from collections.abc import Callable

MAX_LINE_BYTES = 4096
MAX_LINES = 500  # a window; what goes beyond is counted
WINDOW_S = 1.0
KEPT_LINES = 50


class LogLines:
    """Splits bytes into lines and hands each to `on_line`; an endless line is cut into pieces.

    Of more than MAX_LINES within WINDOW_S the rest are left out, and one line says how many they were.
    """

    def __init__(self, on_line: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._on_line = on_line
        self._clock = clock
        self._rest = b""
        self._last: deque[bytes] = deque(maxlen=KEPT_LINES)
        self._window_s = clock()
        self._in_window = 0
        self.left_out = 0  # and not told of yet

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        now_s = self._clock()
        if now_s - self._window_s >= WINDOW_S:
            self.tell_left_out()
            self._window_s, self._in_window = now_s, 0
        *lines, rest = (self._rest + data).split(b"\n")
        while len(rest) > MAX_LINE_BYTES:
            lines.append(rest[:MAX_LINE_BYTES])
            rest = rest[MAX_LINE_BYTES:]
        self._rest = rest
        self._emit(lines)

    def end(self) -> None:
        """Emit what came after the last newline."""
        if self._rest:
            self._emit([self._rest])
            self._rest = b""
        self.tell_left_out()

    def tell_left_out(self) -> None:
        """Emit how many lines were left out since this was last told, if any were."""
        if self.left_out:
            self._on_line(f"({self.left_out} lines were left out: more than {MAX_LINES} in {WINDOW_S:g} s)")
            self.left_out = 0

    def tail(self, count: int) -> list[str]:
        """The last lines, oldest first; those that were left out too."""
        return [_text(line) for line in list(self._last)[-count:]]

    def _emit(self, lines: list[bytes]) -> None:
        self._last.extend(lines[-KEPT_LINES:])
        shown = lines[: MAX_LINES - self._in_window]
        self._in_window += len(shown)
        self.left_out += len(lines) - len(shown)
        for line in shown:
            self._on_line(_text(line))


def _text(line: bytes) -> str:
    return line[:MAX_LINE_BYTES].decode("utf-8", "replace").rstrip("\r")
