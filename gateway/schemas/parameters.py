"""Parameters of paths, queries and headers: declared once, for the code that reads them and for the
description in /openapi.json."""

import re
from dataclasses import dataclass
from typing import Literal

from starlette.requests import Request

from gateway.errors import BadRequest, Unprocessable
from registry import gpu_report, usage_groups

_MOST_DIGITS = 18
_NUMBER = re.compile(r"[0-9]{1,18}(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,2})?")

Place = Literal["path", "query", "header"]
Schema = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter as the description shows it; its subclasses read it."""

    name: str
    place: Place = "query"
    note: str = ""

    @property
    def required(self) -> bool:
        return self.place == "path"

    @property
    def schema(self) -> Schema:
        return {"type": "string"}

    def text(self, request: Request) -> str | None:
        """What the request says, None if nothing."""
        given = request.query_params if self.place == "query" else request.headers
        return given.get(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class PathPart(Parameter):
    """A part of the path."""

    place: Place = "path"
    pattern: str

    @property
    def schema(self) -> Schema:
        return {"type": "string", "pattern": self.pattern}


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole(Parameter):
    """A whole number of `least` to `most`; without a default it must be given."""

    least: int
    most: int
    default: int | None = None

    @property
    def required(self) -> bool:
        return self.default is None

    @property
    def schema(self) -> Schema:
        schema: Schema = {"type": "integer", "minimum": self.least, "maximum": self.most}
        return schema if self.default is None else schema | {"default": self.default}

    def read(self, request: Request) -> int:
        """Raises Unprocessable, or BadRequest if it is missing."""
        text = self.text(request)
        if text is None:
            if self.default is None:
                raise BadRequest(f"{self.name} is missing", param=self.name)
            return self.default
        digits = text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS
        if not digits or not self.least <= int(text) <= self.most:
            raise Unprocessable(f"{self.name} must be {self.least} to {self.most}", param=self.name)
        return int(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag(Parameter):
    """True or false; false by default."""

    @property
    def schema(self) -> Schema:
        return {"enum": ["true", "false", "1", "0"], "default": "false"}

    def read(self, request: Request) -> bool:
        """Raises Unprocessable."""
        text = (self.text(request) or "false").lower()
        if text not in ("true", "false", "1", "0"):
            raise Unprocessable(f"{self.name} must be true or false", param=self.name)
        return text in ("true", "1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment(Parameter):
    """A time in Unix seconds."""

    most: float = 1e12

    @property
    def schema(self) -> Schema:
        return {"type": "number", "minimum": 0, "exclusiveMaximum": self.most}

    def read(self, request: Request) -> float | None:
        """None if it is not given. Raises Unprocessable."""
        text = self.text(request)
        if text is None:
            return None
        if not _NUMBER.fullmatch(text) or not (value := float(text)) < self.most:
            raise Unprocessable(f"{self.name} must be a time in Unix seconds", param=self.name)
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Word(Parameter):
    """A short text."""

    most: int = 256

    @property
    def schema(self) -> Schema:
        return {"type": "string", "maxLength": self.most}

    def read(self, request: Request) -> str | None:
        """None if it is not given. Raises Unprocessable."""
        text = self.text(request)
        if text is not None and len(text) > self.most:
            raise Unprocessable(f"{self.name} may have at most {self.most} characters", param=self.name)
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Parameter):
    """One of some words."""

    choices: tuple[str, ...]

    @property
    def schema(self) -> Schema:
        return {"enum": list(self.choices)}

    def read(self, request: Request) -> str | None:
        """None if it is not given. Raises Unprocessable."""
        text = self.text(request)
        if text is not None and text not in self.choices:
            raise Unprocessable(f"{self.name} must be one of {', '.join(self.choices)}", param=self.name)
        return text


_NAME = "[a-z0-9][a-z0-9-]{0,62}"

FUNCTION_NAME = PathPart(name="name", pattern=f"^{_NAME}$")
FUNCTION_SPEC = PathPart(
    name="function", pattern=f"^{_NAME}(:[1-9][0-9]{{0,8}})?$", note="`NAME`, or `NAME:VERSION`"
)
MODEL = PathPart(name="model", pattern=FUNCTION_SPEC.pattern, note=FUNCTION_SPEC.note)
DIGEST = PathPart(name="digest", pattern="^[0-9a-f]{64}$", note="SHA-256 of the blob")
KEY_ID = PathPart(name="key_id", pattern="^[0-9a-f]{1,64}$")
REQUEST_ID = PathPart(name="request_id", pattern="^[A-Za-z0-9][A-Za-z0-9._:~-]{0,159}$")

TOP_K = Whole(name="top_k", least=1, most=1000, default=5, note="how many labels of an image file")
LINES = Whole(name="lines", least=1, most=100_000, default=100, note="how many lines of each node")
FOLLOW = Flag(name="follow", note="whether to go on with new lines")
SINCE = Moment(name="since", note="from this time on (Unix seconds)")
UNTIL = Moment(name="until", note="before this time (Unix seconds)")
OF_FUNCTION = Word(name="function")
OF_TENANT = Word(name="tenant", note="callers see their own alone")
OF_CAST = Word(name="cast", note="how the id of a cast begins")
SUMMARY = Flag(name="summary", note="whether to leave `nodes` out")
OF_KEY = Word(name="key", note="the id of an API key")
GROUP_BY = Word(name="by", note=f"some of {', '.join(usage_groups.PROPERTIES)}, with commas between")
GPU_BY = Word(name="by", note=f"some of {', '.join(gpu_report.PROPERTIES)}, with commas between, or nothing")
RESOLUTION = Choice(name="resolution", choices=tuple(gpu_report.RESOLUTIONS_S), note="rows by time, in UTC")
FORMAT = Choice(name="format", choices=("json", "csv", "parquet"), note="json unless Accept says otherwise")
UPLOAD_OFFSET = Whole(name="upload-offset", place="header", least=0, most=1 << 53)
UPLOAD_LENGTH = Whole(name="upload-length", place="header", least=0, most=1 << 53)
CLIENT_REQUEST_ID = Word(
    name="X-Request-Id", place="header", note="taken if it is 1 to 128 of A-Za-z0-9._:-, else ignored"
)
