"""The access log: one line a request, written in batches, since a write for each costs more than the line."""

import asyncio
import atexit
import logging
import sys
import time

_log = logging.getLogger("hypercast.access")
_DELAY_S = 0.2
_MAX_LINES = 500


class AccessLog:
    """A buffer of log lines, for the event loop's thread; a killed process loses what is buffered."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._flushing: asyncio.TimerHandle | None = None
        self._second = 0
        self._stamp = ""
        atexit.register(self.flush)

    def __repr__(self) -> str:
        return f"<AccessLog {len(self._lines)} lines>"

    def add(self, text: str) -> None:
        """Write a line soon, with the present time."""
        if not _log.isEnabledFor(logging.INFO):
            return
        now = time.time()
        if int(now) != self._second:
            self._second = int(now)
            self._stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
        self._lines.append(f"{self._stamp},{int(now * 1000) % 1000:03d} INFO hypercast.access: {text}\n")
        if len(self._lines) >= _MAX_LINES:
            self.flush()
        elif self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_later(_DELAY_S, self.flush)

    def flush(self) -> None:
        """Write the buffered lines."""
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        if self._lines:
            lines, self._lines = self._lines, []
            try:
                sys.stderr.write("".join(lines))
                sys.stderr.flush()
            except OSError:  # a full disk or a closed pipe must not fail requests
                pass
