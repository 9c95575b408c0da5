"""A light client of streamed completions that costs a few microseconds per token.

One connection per request; httptools parses the response, and only its end is kept.
"""

import json
import time
from dataclasses import dataclass, field
from itertools import pairwise

from benchmarks.harness.http_exchange import HttpEndpoint, ResponseReader, error_code

# Upper bound of the last events of a stream together.
_TAIL_BYTES = 16_384


@dataclass(slots=True, kw_only=True)
class StreamResult:
    """The result of one request; times are from `time.perf_counter`, `failure` is empty on success.

    It was due at `due_s`, from which latencies count, and sent at `sent_s`, when its bytes were ready.
    `events_s` are the arrivals of pieces of the response, the last of which hold no tokens.
    """

    request_id: str
    due_s: float = 0.0
    sent_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    status: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    start_kind: str = ""
    failure: str = ""
    events_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.due_s

    @property
    def late_s(self) -> float:
        return self.sent_s - self.due_s

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between pieces with tokens."""
        with_tokens = self.events_s[: self.completion_tokens]
        return [after - before for before, after in pairwise(with_tokens) if after <= self.last_s]

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None for a single token."""
        if self.completion_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.completion_tokens - 1)


@dataclass(slots=True)
class _StreamReader(ResponseReader):
    """Receives the response to one request."""

    streamed: StreamResult = field(kw_only=True)
    tail: bytes = b""
    started: bool = False
    before_s: float = 0.0
    now_s: float = 0.0

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-start-kind":
            self.streamed.start_kind = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self.tail = (self.tail + body)[-_TAIL_BYTES:]
        if not self.started:
            # Comments about the instance's start precede the first event.
            if b"data:" not in self.tail:
                return
            self.started = True
            self.streamed.first_s = self.now_s = time.perf_counter()
        self.before_s, self.now_s = self.now_s, time.perf_counter()
        self.streamed.events_s.append(self.now_s)


def parse_tail(streamed: StreamResult, tail: bytes) -> str:
    """Read usage from the end of a response into `streamed`; return the failure, or ""."""
    if streamed.status != 200:
        return f"{streamed.status} {error_code(tail)}"
    events = [line[5:].strip() for line in tail.splitlines() if line.startswith(b"data:")]
    if not events or events[-1] != b"[DONE]":
        return f"stream {error_code(events[-1])}" if events else "stream without events"
    try:
        last = json.loads(events[-2])
        usage, facts = last["usage"], last["hypercast"]
        streamed.prompt_tokens = usage["prompt_tokens"]
        streamed.completion_tokens = usage["completion_tokens"]
        streamed.start_kind = facts["x_start_kind"]
    except (ValueError, LookupError, TypeError):
        return "stream without usage"
    return ""


async def stream_completion(
    target: HttpEndpoint, request_id: str, body: bytes, timeout_s: float, due_s: float | None = None
) -> StreamResult:
    """Request a completion and read it to its end; failures are reported in the result.

    It is due now unless `due_s` is given.
    """
    request, now_s = target.request(request_id, body), time.perf_counter()
    streamed = StreamResult(request_id=request_id, due_s=now_s if due_s is None else due_s, sent_s=now_s)
    reader = _StreamReader(streamed=streamed)
    try:
        await reader.read(target, request, timeout_s)
    except TimeoutError:
        streamed.failure = "timeout"
    except OSError as error:
        streamed.failure = f"connection: {error.strerror or type(error).__name__}"
    else:
        streamed.status = reader.status
        streamed.last_s = reader.before_s  # the last event holds no token: it is sent after billing
        lost = "" if reader.complete else "connection lost"
        streamed.failure = reader.failure or lost or parse_tail(streamed, reader.tail)
    return streamed
