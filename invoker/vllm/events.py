"""What vLLM's server answers: event streams, bodies and errors, with the usage that bills need. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from invoker.engine.contract import EngineError

MAX_EVENT_BYTES = 16 << 20
DONE = b"[DONE]"
_PREFIX = b"data:"


class BadAnswer(Exception):
    """The server's answer is not what its API promises."""


class ServerRefused(EngineError):
    """The server answered with an error. `status` is its HTTP status."""

    code = "bad_request"

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        if status >= 500:
            self.code = "internal"


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens of a request, as the server counted them."""

    prompt: int = 0
    completion: int = 0


class EventSplitter:
    """Splits an event stream into the data of its events."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the data of the events that are complete now. Raises BadAnswer for an endless one."""
        self._rest += data
        while (end := self._rest.find(b"\n\n")) >= 0:
            event = bytes(self._rest[:end])
            del self._rest[: end + 2]
            lines = [line for line in event.split(b"\n") if line.startswith(_PREFIX)]
            if lines:
                yield b"\n".join(line.removeprefix(_PREFIX).strip() for line in lines)
        if len(self._rest) > MAX_EVENT_BYTES:
            raise BadAnswer(f"an event of more than {MAX_EVENT_BYTES} bytes")


def usage_of(value: object) -> TokenUsage | None:
    """Return the usage that a decoded body or chunk has, if any."""
    usage = value.get("usage") if isinstance(value, dict) else None
    if not isinstance(usage, dict):
        return None
    counts = [usage.get(name) or 0 for name in ("prompt_tokens", "completion_tokens")]
    return TokenUsage(*(count if isinstance(count, int) and count >= 0 else 0 for count in counts))


def refused(status: int, body: bytes) -> ServerRefused:
    """Return the error of a response with that status."""
    try:
        decoded = msgspec.json.decode(body)
    except msgspec.DecodeError:
        decoded = None
    error = decoded.get("error") if isinstance(decoded, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return ServerRefused(status, str(message or f"vLLM answered with status {status}")[:2000])


def decode_event(event: bytes) -> Any:
    """Return the chunk of an event. Raises BadAnswer, and ServerRefused for an error within a stream."""
    try:
        chunk = msgspec.json.decode(event)
    except msgspec.DecodeError as error:
        raise BadAnswer(f"an event that is not JSON: {error}") from error
    if isinstance(chunk, dict) and chunk.get("error") is not None:
        raise refused(500, event)
    return chunk


class ForwardedStream:
    """The events of a streamed request whose chunks all have the usage so far; the client sees what it wants.

    `wants_usage`: a last chunk with the usage; `wants_each`: in all chunks.
    """

    def __init__(self, *, wants_usage: bool, wants_each: bool) -> None:
        self._wants_usage = wants_usage
        self._wants_each = wants_each
        self._splitter = EventSplitter()
        self.usage = TokenUsage()
        self.is_over = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the data of the events for the client, without the last one.

        Raises BadAnswer, and ServerRefused for the server's error.
        """
        for event in self._splitter.feed(data):
            if event == DONE:
                self.is_over = True
                return
            if (shown := self._shown(event)) is not None:
                yield shown

    def _shown(self, event: bytes) -> bytes | None:
        chunk = decode_event(event)
        found = usage_of(chunk)
        if found is None:
            return event
        self.usage = found
        is_last = chunk.get("choices") == []
        if self._wants_each or (is_last and self._wants_usage):
            return event
        if is_last:
            return None
        del chunk["usage"]
        return msgspec.json.encode(chunk)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardedRequest:
    """A request as the server gets it, with the usage in each chunk of a stream."""

    body: bytes
    streams: bool
    wants_usage: bool
    wants_each: bool


def prepare_request(body: bytes, request_id: str) -> ForwardedRequest:
    """Return the request for the server, otherwise as the gateway sent it. Raises ValueError."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ValueError(f"the body is not a JSON object: {error}") from error
    fields["request_id"] = request_id
    streams = fields.get("stream") is True
    options = fields.get("stream_options")
    given = options if isinstance(options, dict) else {}
    if streams:
        fields["stream_options"] = {**given, "include_usage": True, "continuous_usage_stats": True}
    return ForwardedRequest(
        body=msgspec.json.encode(fields),
        streams=streams,
        wants_usage=given.get("include_usage") is True,
        wants_each=given.get("include_usage") is True and given.get("continuous_usage_stats") is True,
    )
