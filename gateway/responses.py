"""Small responses."""

from collections.abc import Iterable

import msgspec
from starlette.responses import Response


def json_response(body: bytes, *, status: int = 200, headers: Iterable[tuple[str, str]] = ()) -> Response:
    """Encoded JSON as a response."""
    return Response(body, status_code=status, headers=dict(headers), media_type="application/json")


def encoded(value: object, *, status: int = 200, headers: Iterable[tuple[str, str]] = ()) -> Response:
    """Any record as JSON."""
    return json_response(msgspec.json.encode(value), status=status, headers=headers)
