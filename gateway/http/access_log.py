"""The access log: one line a request, written in batches, since a write for each costs more than the line."""

import asyncio
import atexit
import logging
import sys
import time

import msgspec

from registry.logs.lines import LogFormat

_log = logging.getLogger("hypercast.access")
_DELAY_S = 0.2
_MAX_LINES = 500
_encode = msgspec.json.Encoder().encode


class AccessEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request that is over, as a line shows it; `path` has no characters that could end the line."""

    request_id: str
    method: str
    path: str
    status: int
    duration_ms: float
    trace_id: str = ""
    function: str = ""
    version: int = 0
    start_kind: str = ""
    node: str = ""
    key: str = ""
    client_request_id: str = ""
    code: str = ""


class AccessLog:
    """A buffer of log lines, for the event loop's thread; a killed process loses what is buffered."""

    def __init__(self, form: LogFormat = "text", process: str = "gateway") -> None:
        self._is_json = form == "json"
        self._head = f'"level":"INFO","logger":"{_log.name}","process":{_encode(process).decode()}'
        self._lines: list[str] = []
        self._flushing: asyncio.TimerHandle | None = None
        self._second = 0
        self._stamp = ""  # of the second
        atexit.register(self.flush)

    def __repr__(self) -> str:
        return f"<AccessLog {len(self._lines)} lines>"

    def add(self, entry: AccessEntry) -> None:
        """Write a line soon, with the present time."""
        if not _log.isEnabledFor(logging.INFO):
            return
        now = time.time()
        if int(now) != self._second:
            self._second = int(now)
            self._stamp = (
                time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
                if self._is_json
                else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
            )
        milliseconds = int(now * 1000) % 1000
        self._lines.append((self._json if self._is_json else self._text)(entry, milliseconds))
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

    def _text(self, entry: AccessEntry, milliseconds: int) -> str:
        trace = f" trace={entry.trace_id}" if entry.trace_id else ""
        return (
            f"{self._stamp},{milliseconds:03d} INFO hypercast.access: "
            f"{entry.request_id} {entry.method} {entry.path} {entry.status} {entry.duration_ms:.1f} ms "
            f"function={entry.function or '-'}:{entry.version} start={entry.start_kind or '-'} "
            f"node={entry.node or '-'} key={entry.key or '-'} client_id={entry.client_request_id or '-'} "
            f"code={entry.code or '-'}{trace}\n"
        )

    def _json(self, entry: AccessEntry, milliseconds: int) -> str:
        """Return the line as `json_line` would, which takes three times as long."""
        message = _encode(f"{entry.method} {entry.path} {entry.status}").decode()
        time_ = f"{self._stamp}.{milliseconds:03d}Z"
        return f'{{"time":"{time_}",{self._head},"message":{message},{_encode(entry).decode()[1:]}\n'
