"""Parameters of paths, queries and headers, for the handlers and for /openapi.json."""

import re
from dataclasses import dataclass
from typing import Literal

from starlette.requests import Request

from gateway.core.errors import BadRequest, Unprocessable
from registry.accounting import gpu_report, usage_groups
from registry.config.function_secrets import KEY_PATTERN
from registry.exports.exporter import ExportFormat
from registry.exports.focus import PROVIDER as EXPORT_PROVIDER
from registry.records.audit import AuditLogName

_MAX_DIGITS = 18
_NUMBER = re.compile(r"[0-9]{1,18}(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,2})?")

ParameterLocation = Literal["path", "query", "header"]
Schema = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter; subclasses parse it."""

    name: str
    place: ParameterLocation = "query"
    note: str = ""

    @property
    def required(self) -> bool:
        return self.place == "path"

    @property
    def schema(self) -> Schema:
        return {"type": "string"}

    def text(self, request: Request) -> str | None:
        """Return the raw text, None if the request lacks it."""
        given = request.query_params if self.place == "query" else request.headers
        return given.get(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class PathParameter(Parameter):
    """A part of the path."""

    place: ParameterLocation = "path"
    pattern: str

    @property
    def schema(self) -> Schema:
        return {"type": "string", "pattern": self.pattern}


@dataclass(frozen=True, slots=True, kw_only=True)
class IntParameter(Parameter):
    """An integer in [min, max]; required if it has no default."""

    min: int
    max: int
    default: int | None = None

    @property
    def required(self) -> bool:
        return self.default is None

    @property
    def schema(self) -> Schema:
        schema: Schema = {"type": "integer", "minimum": self.min, "maximum": self.max}
        return schema if self.default is None else schema | {"default": self.default}

    def read(self, request: Request) -> int:
        """Return the value. Raises Unprocessable, or BadRequest if it is missing."""
        text = self.text(request)
        if text is None:
            if self.default is None:
                raise BadRequest(f"'{self.name}' is required", param=self.name)
            return self.default
        digits = text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
        if not digits or not self.min <= int(text) <= self.max:
            raise Unprocessable(
                f"'{self.name}' must be an integer from {self.min} to {self.max}", param=self.name
            )
        return int(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoolParameter(Parameter):
    """A boolean, false by default."""

    @property
    def schema(self) -> Schema:
        return {"enum": ["true", "false", "1", "0"], "default": "false"}

    def read(self, request: Request) -> bool:
        """Return the value. Raises Unprocessable."""
        text = (self.text(request) or "false").lower()
        if text not in ("true", "false", "1", "0"):
            raise Unprocessable(f"'{self.name}' must be true or false", param=self.name)
        return text in ("true", "1")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeParameter(Parameter):
    """A time in Unix seconds."""

    max: float = 1e12

    @property
    def schema(self) -> Schema:
        return {"type": "number", "minimum": 0, "exclusiveMaximum": self.max}

    def read(self, request: Request) -> float | None:
        """Return the value, None if it is not given. Raises Unprocessable."""
        text = self.text(request)
        if text is None:
            return None
        if not _NUMBER.fullmatch(text) or not (value := float(text)) < self.max:
            raise Unprocessable(f"'{self.name}' must be a time in Unix seconds", param=self.name)
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class StringParameter(Parameter):
    """A short string."""

    max: int = 256

    @property
    def schema(self) -> Schema:
        return {"type": "string", "maxLength": self.max}

    def read(self, request: Request) -> str | None:
        """Return the value, None if it is not given. Raises Unprocessable."""
        text = self.text(request)
        if text is not None and len(text) > self.max:
            raise Unprocessable(f"'{self.name}' must have at most {self.max} characters", param=self.name)
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class EnumParameter(Parameter):
    """One of a fixed set of words."""

    choices: tuple[str, ...]

    @property
    def schema(self) -> Schema:
        return {"enum": list(self.choices)}

    def read(self, request: Request) -> str | None:
        """Return the value, None if it is not given. Raises Unprocessable."""
        text = self.text(request)
        if text is not None and text not in self.choices:
            raise Unprocessable(f"'{self.name}' must be one of {', '.join(self.choices)}", param=self.name)
        return text


_NAME = "[a-z0-9][a-z0-9-]{0,62}"

FUNCTION_NAME = PathParameter(name="name", pattern=f"^{_NAME}$")
FUNCTION_SPEC = PathParameter(
    name="function", pattern=f"^{_NAME}(:[1-9][0-9]{{0,8}})?$", note="`NAME`, or `NAME:VERSION`"
)
SECRET_KEY = PathParameter(name="key", pattern=f"^{KEY_PATTERN}$")
MODEL = PathParameter(name="model", pattern=FUNCTION_SPEC.pattern, note=FUNCTION_SPEC.note)
MODEL_NAME = PathParameter(name="model", pattern=FUNCTION_NAME.pattern)
MODEL_VERSION = PathParameter(name="version", pattern="^[1-9][0-9]{0,8}$")
DIGEST = PathParameter(name="digest", pattern="^[0-9a-f]{64}$", note="SHA-256 of the blob")
KEY_ID = PathParameter(name="key_id", pattern="^[0-9a-f]{1,64}$")
NODE_ID = PathParameter(name="node", pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
ONCE = BoolParameter(name="once", note="end after the first event, which has everything")
UI_FILE = PathParameter(name="file", pattern="^[a-z][a-z-]{0,63}[.](css|js|svg|html)$")
REQUEST_ID = PathParameter(
    name="request_id",
    pattern="^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$",
    note="as in the response's `x-request-id`",
)

PREDICTION = PathParameter(
    name="prediction", pattern="^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$", note="its id, which a client may choose"
)
FILE = PathParameter(name="file", pattern="^file-[0-9a-f]{24}$")
BATCH = PathParameter(name="batch", pattern="^batch_[0-9a-f]{24}$")
PREFER = StringParameter(
    name="prefer",
    place="header",
    note="`respond-async`: answer at once; `wait=N`: when it has ended, or after N seconds",
)
FILE_LIMIT = IntParameter(name="limit", min=1, max=10_000, default=10_000, note="most entries of the answer")
PAGE_LIMIT = IntParameter(name="limit", min=1, max=100, default=20, note="most entries of the answer")
AFTER = StringParameter(name="after", note="an id: the entries that follow it")
ORDER = EnumParameter(name="order", choices=("asc", "desc"), note="by creation; the latest first by default")
PURPOSE = StringParameter(name="purpose")

TOP_K = IntParameter(name="top_k", min=1, max=1000, default=5, note="number of labels for an image file")
LINES = IntParameter(name="lines", min=1, max=100_000, default=100, note="number of lines of each node")
FOLLOW = BoolParameter(name="follow", note="whether to follow with new lines")
SINCE = TimeParameter(name="since", note="start of the period, inclusive (Unix seconds)")
UNTIL = TimeParameter(name="until", note="end of the period, exclusive (Unix seconds)")
OF_FUNCTION = StringParameter(name="function")
OF_TENANT = StringParameter(name="tenant", note="callers see only their own")
OF_CAST = StringParameter(name="cast", note="prefix of a cast's id")
SUMMARY = BoolParameter(name="summary", note="whether to omit `nodes`")
AUDIT_LOG = EnumParameter(
    name="log",
    choices=tuple(AuditLogName),
    note="`changes` (the default), or `refused`: attempts of keys that lacked the right",
)
OF_OPERATION = StringParameter(name="operation", note="such as `key.create`, or `key.` for all of keys")
LIMIT = IntParameter(name="limit", min=1, max=1000, default=100, note="most entries of the answer")
CURSOR = StringParameter(name="cursor", note="`next` of an answer: the entries before")
OF_KEY = StringParameter(name="key", note="the id of an API key")
GROUP_BY = StringParameter(name="by", note=f"comma-separated list of {', '.join(usage_groups.PROPERTIES)}")
GPU_BY = StringParameter(
    name="by", note=f"comma-separated list of {', '.join(gpu_report.PROPERTIES)}; may be empty"
)
RESOLUTION = EnumParameter(
    name="resolution", choices=tuple(gpu_report.RESOLUTIONS_S), note="rows by time, in UTC"
)
FORMAT = EnumParameter(
    name="format", choices=("json", "csv", "parquet"), note="default: json, or as Accept says"
)
EXPORT_FORMAT = EnumParameter(
    name="format",
    choices=tuple(ExportFormat),
    note="default: focus, as CSV; the others are a JSON object a line",
)
PROVIDER = StringParameter(
    name="provider", max=128, note=f"the platform's operator in FOCUS; default: {EXPORT_PROVIDER}"
)
UPLOAD_OFFSET = IntParameter(name="upload-offset", place="header", min=0, max=1 << 53)
UPLOAD_LENGTH = IntParameter(name="upload-length", place="header", min=0, max=1 << 53)
CLIENT_REQUEST_ID = StringParameter(
    name="X-Request-Id", place="header", note="used if it is 1 to 128 of A-Za-z0-9._:-, else ignored"
)
