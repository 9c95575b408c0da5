"""One operation of the HTTP API: the entry of the table from which routes and /openapi.json are made."""

from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass
from typing import Generic, TypeVar

from starlette.requests import Request

from gateway.core.rights import Right
from gateway.schemas.parameters import Parameter

JSON = "application/json"
EVENTS = "text/event-stream"
LINES = "application/x-ndjson"
TEXT = "text/plain"
HTML = "text/html"
CSS = "text/css"
SCRIPT = "text/javascript"
SVG = "image/svg+xml"
BYTES = "application/octet-stream"
CSV = "text/csv"
FORM = "multipart/form-data"
PARQUET = "application/vnd.apache.parquet"

H = TypeVar("H")

Handler = Callable[[Request], Awaitable[object]]
"""Returns the struct or record to send as JSON, or an ASGI application as the response."""


@dataclass(frozen=True, slots=True)
class Audit:
    """How the audit log records a change.

    `target` is the field of the body which names what changes where no parameter of the path does; `made`
    is the field of the answer which names what was made.
    """

    operation: str
    target: str = ""
    made: str = ""


@dataclass(frozen=True, slots=True)
class Operation(Generic[H]):
    """One method of one path; `handler` selects its handler from the gateway's handlers `H`.

    `body` is a JSON type, or the media types of a body that has none; `empty_body` means that no body is
    `{}`. `answer` is the type of the good JSON response, `others` its other media types. `any_body` and
    `any_answer` are the JSON types of an operation that has several. `failures` are statuses beyond those
    that every such operation shares. `calls` are calls of functions. A body with `streamed_body` is
    processed as it arrives. A response that `follows` a log does not delay a shutdown. `audit` is how a
    change is recorded; an operation of a changing method without it has the reason in `unaudited`. A `rated`
    one has the rate of its key's requests. `also` are good statuses beside `status`.
    """

    method: str
    path: str
    handler: Callable[[H], Handler]
    summary: str
    answer: object = None
    _: KW_ONLY
    needs: Right
    body: type | tuple[str, ...] | None = None
    empty_body: bool = False
    others: tuple[str, ...] = ()
    any_body: tuple[type, ...] = ()
    any_answer: tuple[type, ...] = ()
    status: int = 200
    parameters: tuple[Parameter, ...] = ()
    failures: tuple[int, ...] = ()
    calls: bool = False
    streamed_body: bool = False
    follows: bool = False
    audit: Audit | None = None
    unaudited: str = ""
    rated: bool = False
    also: tuple[int, ...] = ()
