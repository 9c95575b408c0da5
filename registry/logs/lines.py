"""The format of log lines: text, or a JSON object a line with the ids of request and trace."""

import logging
import sys
from datetime import UTC, datetime
from typing import Literal

import msgspec

from registry.logs.context import log_context

LogFormat = Literal["text", "json"]

_encode = msgspec.json.Encoder(enc_hook=str).encode


def configure_logs(level: str, form: LogFormat, process: str, *, shows_process: bool = False) -> None:
    """Send the log to stderr. `process` names this process in JSON, and in text with `shows_process`."""
    shown = f" {process}" if shows_process else ""
    formatter = logging.Formatter(f"%(asctime)s %(levelname)s{shown} %(name)s: %(message)s")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(process) if form == "json" else formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class JsonLines(logging.Formatter):
    """A formatter of lines as JSON; text that is no UTF-8 is shown with escapes."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {"message": record.getMessage()}
        if (context := log_context.get()) is not None:
            line |= {"request_id": context.request_id, "trace_id": context.trace_id}
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = record.stack_info
        return json_line(record.created, record.levelname, record.name, self._process, line)


def json_line(at: float, level: str, logger: str, process: str, fields: dict[str, object]) -> str:
    """Return a line of JSON without its end; `at` is Unix seconds, and empty fields are left out."""
    moment = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    head = {"time": moment, "level": level, "logger": logger, "process": process}
    line = head | {name: value for name, value in fields.items() if value != ""}
    try:
        return _encode(line).decode()
    except UnicodeEncodeError:  # lone surrogates, as of file names
        return _encode({name: _escaped(value) for name, value in line.items()}).decode()


def _escaped(value: object) -> object:
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value
