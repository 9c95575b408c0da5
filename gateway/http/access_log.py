"""The access log: a line a request, written in batches, since a write each would cost more than the line."""

import asyncio
import atexit
import logging
import sys
import time

_log = logging.getLogger("hypercast.access")
_DELAY_S = 0.2
_MOST_LINES = 500


class AccessLog:
    """Belongs to the event loop's thread. Lines that wait when a process is killed are lost."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._flushing: asyncio.TimerHandle | None = None
        self._second = 0
        self._stamp = ""
        atexit.register(self.flush)

    def __repr__(self) -> str:
        return f"<AccessLog {len(self._lines)} lines>"

    def line(self, text: str) -> None:
        """Have a line written soon, under the time of now."""
        if not _log.isEnabledFor(logging.INFO):
            return
        now = time.time()
        if int(now) != self._second:
            self._second = int(now)
            self._stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
        self._lines.append(f"{self._stamp},{int(now * 1000) % 1000:03d} INFO hypercast.access: {text}\n")
        if len(self._lines) >= _MOST_LINES:
            self.flush()
        elif self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_later(_DELAY_S, self.flush)

    def flush(self) -> None:
        """Write what waits."""
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        if self._lines:
            lines, self._lines = self._lines, []
            try:
                sys.stderr.write("".join(lines))
                sys.stderr.flush()
            except OSError:  # a full disk, a closed pipe: there is nowhere to say so, and requests go on
                pass
