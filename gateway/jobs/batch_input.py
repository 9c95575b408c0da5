"""The lines of a batch's file: each a call, in JSON. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from gateway.core.errors import ApiError
from gateway.core.settings import JsonBounds, RequestLimits
from gateway.core.validation import validation_message
from gateway.http.limits import check_shape
from registry.records.batch import BatchFault

MAX_FAULTS = 50
_BLANK = b" \t\r"


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    custom_id: Annotated[str, Meta(min_length=1, max_length=256)]
    method: str
    url: str
    body: msgspec.Raw


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    model: Annotated[str, Meta(min_length=1, max_length=128)]
    stream: bool | None = None


_line = msgspec.json.Decoder(_Line)
_body = msgspec.json.Decoder(_Body)


@dataclass(frozen=True, slots=True)
class BatchCall:
    """A call of a batch; `end` is the offset of the next line in the file, in bytes."""

    custom_id: str
    model: str
    body: bytes
    end: int


class _Fault(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


@dataclass(frozen=True, slots=True, kw_only=True)
class LineBounds:
    """Limits of a batch's file."""

    lines: int
    line_bytes: int
    limits: RequestLimits

    @property
    def json(self) -> JsonBounds:
        return self.limits.text_json


def parse_call(raw: bytes, endpoint: str, bounds: LineBounds, end: int) -> BatchCall:
    """Return the call of a line. Raises _Fault."""
    if len(raw) > bounds.line_bytes:
        raise _Fault("line_too_long", f"the line is longer than {bounds.line_bytes} bytes")
    try:
        check_shape(raw, bounds.json, bounds.limits.json_depth)
        line = _line.decode(raw)
        body = _body.decode(line.body)
    except msgspec.ValidationError as error:
        message, path = validation_message(error, "")
        raise _Fault("invalid_request", message, path or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _Fault("invalid_json_line", f"the line is not valid JSON: {error}") from None
    except ApiError as error:  # over the bounds of a body
        raise _Fault("invalid_request", str(error)) from None
    if line.method != "POST":
        raise _Fault("invalid_method", "'method' must be POST", "method")
    if line.url != endpoint:
        raise _Fault("invalid_url", f"'url' must be the batch's endpoint, {endpoint}", "url")
    if body.stream:
        raise _Fault("stream_not_supported", "the calls of a batch are not streamed", "body.stream")
    return BatchCall(line.custom_id, body.model, bytes(line.body), end)


class LineSplitter:
    """The lines of a file whose bytes arrive in parts, each with the offset of the next."""

    def __init__(self, offset: int = 0) -> None:
        self._offset = offset  # of the beginning of `_rest`
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[tuple[bytes, int]]:
        """Yield the lines that end in these bytes, but for blank ones."""
        *whole, rest = (self._rest + data).split(b"\n")
        self._rest = rest
        for line in whole:
            self._offset += len(line) + 1
            if line.strip(_BLANK):
                yield line, self._offset

    def last(self) -> Iterator[tuple[bytes, int]]:
        """Yield the last line, if it does not end with a line break."""
        if self._rest.strip(_BLANK):
            yield self._rest, self._offset + len(self._rest)

    @property
    def rest_bytes(self) -> int:
        """The bytes of the line that has not ended."""
        return len(self._rest)


class InputCheck:
    """The validation of a whole file, part by part."""

    def __init__(self, endpoint: str, bounds: LineBounds) -> None:
        self._endpoint = endpoint
        self._bounds = bounds
        self._splitter = LineSplitter()
        self._ids: set[str] = set()
        self.total = 0
        self.faults: list[BatchFault] = []

    def feed(self, data: bytes) -> bool:
        """Check the lines that end in these bytes; return whether the rest is of interest."""
        self._check(self._splitter.feed(data))
        if self._splitter.rest_bytes > self._bounds.line_bytes:
            text = f"the line is longer than {self._bounds.line_bytes} bytes"
            self._note(BatchFault(code="line_too_long", message=text, line=self.total + 1))
            return False
        return len(self.faults) < MAX_FAULTS and self.total <= self._bounds.lines

    def end(self) -> None:
        """Check the last line, and the whole."""
        self._check(self._splitter.last())
        if self.total > self._bounds.lines:
            text = f"the file has more than {self._bounds.lines} calls"
            self._note(BatchFault(code="too_many_requests", message=text))
        elif not self.total:
            self._note(BatchFault(code="empty_file", message="the file has no calls"))

    def _check(self, lines: Iterator[tuple[bytes, int]]) -> None:
        for raw, end in lines:
            self.total += 1
            try:
                call = parse_call(raw, self._endpoint, self._bounds, end)
                if call.custom_id in self._ids:
                    raise _Fault("duplicate_custom_id", f"{call.custom_id!r} repeats", "custom_id")
                self._ids.add(call.custom_id)
            except _Fault as fault:
                text = str(fault)
                self._note(BatchFault(code=fault.code, message=text, line=self.total, param=fault.param))

    def _note(self, fault: BatchFault) -> None:
        if len(self.faults) < MAX_FAULTS:
            self.faults.append(fault)
