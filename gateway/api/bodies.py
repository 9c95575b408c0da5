"""JSON bodies of the administration."""

from typing import TypeVar

import msgspec
from starlette.requests import Request

from gateway.http.limits import decode, read_body
from gateway.requests.services import Services

T = TypeVar("T")


async def read_json(
    request: Request, services: Services, decoder: msgspec.json.Decoder[T], *, absent: bytes = b""
) -> T:
    """Return the decoded body, `absent` if it is empty. Raises ApiError, ClientGone, ValidationError."""
    limits = services.settings.limits
    return decode(await read_body(request.scope, request.receive, limits) or absent, decoder, limits)
