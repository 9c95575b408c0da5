"""Forms with one file (RFC 7578), parsed as they arrive: the file is not held in memory."""

from collections.abc import AsyncIterator

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.types import Receive, Scope

from gateway.core.errors import BadRequest
from gateway.http.limits import ClientGone, next_chunk, too_large

_MAX_FIELD_BYTES, _MAX_FIELDS, _MAX_HEADER_BYTES = 4096, 16, 4096
_MAX_BOUNDARY = 70  # RFC 2046


class UploadForm:
    """A form that arrives: `fields` are those seen so far, the file's bytes come from `chunks`.

    A form has at most one file, in the field `file`.
    """

    def __init__(self, scope: Scope, *, limit_bytes: int, idle_s: float) -> None:
        """Read the boundary. Raises BadRequest."""
        given = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
        kind, options = parse_options_header(given)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not 0 < len(boundary) <= _MAX_BOUNDARY:
            raise BadRequest("the body must be multipart/form-data with a boundary")
        self._limit_bytes = limit_bytes
        self._idle_s = idle_s
        self.fields: dict[str, str] = {}
        self.filename: str | None = None  # once the file has started
        self._name = ""
        self._is_file = False
        self._value = bytearray()
        self._header, self._header_value = bytearray(), bytearray()
        self._disposition = b""
        self._file_chunks: list[bytes] = []
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._on_part_begin,
                "on_header_field": self._on_header_field,
                "on_header_value": self._on_header_value,
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers_finished,
                "on_part_data": self._on_part_data,
                "on_part_end": self._on_part_end,
            },
        )

    async def chunks(self, receive: Receive) -> AsyncIterator[bytes]:
        """Yield the file's bytes; at the end all fields are known. Raises ApiError, ClientGone."""
        nbytes = 0
        more = True
        while more:
            message = await next_chunk(receive(), self._idle_s)
            if message["type"] == "http.disconnect":
                raise ClientGone
            body, more = message.get("body", b""), message.get("more_body", False)
            nbytes += len(body)
            if nbytes > self._limit_bytes:
                raise too_large(self._limit_bytes)
            try:
                self._parser.write(body)
                if not more:
                    self._parser.finalize()
            except FormParserError as error:
                raise BadRequest(f"the form is malformed: {error}") from None
            chunks, self._file_chunks = self._file_chunks, []
            for chunk in chunks:
                yield chunk
        if self.filename is None:
            raise BadRequest("the form has no file in the field 'file'", param="file")

    def _on_part_begin(self) -> None:
        self._name, self._is_file, self._disposition = "", False, b""
        self._value.clear()

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]
        self._check_header()

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]
        self._check_header()

    def _check_header(self) -> None:
        if len(self._header) + len(self._header_value) > _MAX_HEADER_BYTES:
            raise BadRequest("a header of the form is too long")

    def _on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = bytes(self._header_value)
        self._header.clear()
        self._header_value.clear()

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = b"filename" in options
        if self._is_file:
            if self._name != "file" or self.filename is not None:
                raise BadRequest("the form must have one file, in the field 'file'", param="file")
            self.filename = options[b"filename"].decode("utf-8", "replace")
        elif len(self.fields) >= _MAX_FIELDS:
            raise BadRequest(f"the form has more than {_MAX_FIELDS} fields")

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._file_chunks.append(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > _MAX_FIELD_BYTES:
            raise BadRequest(f"a field is longer than {_MAX_FIELD_BYTES} bytes", param=self._name[:64])

    def _on_part_end(self) -> None:
        if not self._is_file:
            self.fields[self._name] = self._value.decode("utf-8", "replace")
