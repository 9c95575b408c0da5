"""Which request a task works for, so that the lines of its log name it."""

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LogContext:
    """The ids that the lines of a request's task have, "" for none."""

    request_id: str
    trace_id: str = ""


log_context: ContextVar[LogContext | None] = ContextVar("log_context", default=None)
