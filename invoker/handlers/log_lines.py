"""A process's output as lines: bounded in length and rate."""

import time
from collections.abc import Callable

MAX_LINE_BYTES = 4096
MAX_LINES = 500  # in a window; more are dropped and counted
WINDOW_S = 1.0


class LineSplitter:
    """Splits bytes into lines and passes each to `on_line`; an endless line is cut into pieces.

    Of more than MAX_LINES within WINDOW_S the rest are dropped, and one line reports their number.
    """

    def __init__(self, on_line: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._on_line = on_line
        self._clock = clock
        self._rest = b""
        self._window_s = clock()
        self._in_window = 0
        self.dropped = 0  # since the last report

    def feed(self, data: bytes) -> None:
        """Add bytes, emitting the lines that they complete."""
        now_s = self._clock()
        if now_s - self._window_s >= WINDOW_S:
            self.report_dropped()
            self._window_s, self._in_window = now_s, 0
        *lines, rest = (self._rest + data).split(b"\n")
        while len(rest) > MAX_LINE_BYTES:
            lines.append(rest[:MAX_LINE_BYTES])
            rest = rest[MAX_LINE_BYTES:]
        self._rest = rest
        self._emit(lines)

    def end(self) -> None:
        """Emit the text after the last newline."""
        if self._rest:
            self._emit([self._rest])
            self._rest = b""
        self.report_dropped()

    def report_dropped(self) -> None:
        """Emit a line with the number of lines dropped since the last report, if any."""
        if self.dropped:
            self._on_line(f"({self.dropped} lines dropped: more than {MAX_LINES} in {WINDOW_S:g} s)")
            self.dropped = 0

    def _emit(self, lines: list[bytes]) -> None:
        shown = lines[: MAX_LINES - self._in_window]
        self._in_window += len(shown)
        self.dropped += len(lines) - len(shown)
        for line in shown:
            self._on_line(_text(line))


def _text(line: bytes) -> str:
    return line[:MAX_LINE_BYTES].decode("utf-8", "replace").rstrip("\r")
