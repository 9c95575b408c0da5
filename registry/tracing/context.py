"""Ids of traces and spans, and the headers of W3C Trace Context that carry them (pure but for randomness)."""

import hashlib
import random
import re
from dataclasses import dataclass

from registry.messages.trace import TraceContext

MAX_STATE_CHARS = 512

_PARENT = re.compile(r"(?P<version>[0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?P<more>-.*)?")
_STATE = re.compile(r"[\x20-\x7e\t]*")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class SpanContext:
    """A span's place: its trace, its id, and the `tracestate` of the trace."""

    trace_id: int
    span_id: int
    state: str = ""

    def __repr__(self) -> str:
        return f"SpanContext({self.trace_id:032x}/{self.span_id:016x})"

    @property
    def trace_name(self) -> str:
        """The trace's id as logs and user interfaces show it."""
        return f"{self.trace_id:032x}"

    @property
    def header(self) -> str:
        """The `traceparent` of what this span calls."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-01"

    def child(self) -> "SpanContext":
        """Return the place of a new span of the same trace."""
        return SpanContext(self.trace_id, new_id(64), self.state)

    def message(self) -> TraceContext:
        """Return the context as messages carry it."""
        return TraceContext(self.header, self.state)


@dataclass(frozen=True, slots=True)
class CallerTrace:
    """What a caller's headers say: the span that called, and whether its trace is recorded."""

    context: SpanContext
    sampled: bool


def new_id(bits: int) -> int:
    """Return a random id of that many bits that is not 0."""
    return random.getrandbits(bits) or 1


def new_trace() -> SpanContext:
    """Return the place of the first span of a new trace."""
    return SpanContext(new_id(128), new_id(64))


def named_trace(kind: str, name: str) -> SpanContext:
    """Return the first span of the trace of a thing, such as a cast: the same in every process."""
    digest = hashlib.sha256(f"{kind}\0{name}".encode()).digest()
    return SpanContext(int.from_bytes(digest[:16]) or 1, int.from_bytes(digest[16:24]) or 1)


def parse_trace(parent: str, state: str = "") -> CallerTrace | None:
    """Parse the headers; None without a valid `traceparent`. An invalid `tracestate` is left out."""
    found = _PARENT.fullmatch(parent)
    if found is None or found["version"] == "ff" or (found["version"] == "00" and found["more"]):
        return None
    trace_id, span_id, flags = (int(found[number], 16) for number in (2, 3, 4))
    if not trace_id or not span_id:
        return None
    kept = state if len(state) <= MAX_STATE_CHARS and _STATE.fullmatch(state) else ""
    return CallerTrace(SpanContext(trace_id, span_id, kept), bool(flags & _SAMPLED))


def parse_message(message: TraceContext | None) -> SpanContext | None:
    """Return the span that sent a message, if its trace is recorded."""
    if message is None:
        return None
    caller = parse_trace(message.parent, message.state)
    return caller.context if caller is not None and caller.sampled else None
