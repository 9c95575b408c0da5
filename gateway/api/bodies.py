"""The bodies of requests, and the function that one of the administration names."""

from typing import TypeVar

import msgspec
from starlette.requests import Request

from gateway.core.request_context import request_context
from gateway.core.rights import Right, may
from gateway.core.settings import RequestLimits
from gateway.http.limits import decode, read_body
from gateway.requests.services import Services
from gateway.tenants.access import require_manage, require_named
from registry.records.function import Function

T = TypeVar("T")


async def managed_function(request: Request, services: Services) -> Function:
    """Return the function that the path names, if the key may change it. Raises NotFound, Forbidden."""
    key, name = request_context(request.scope).caller, request.path_params["name"]
    if not may(key, Right.ADMIN):
        require_named(key, name, "manage")  # before it shows whether there is such a function
    function = await services.state.function(name)
    require_manage(key, function)
    return function


async def read_json(
    request: Request, services: Services, decoder: msgspec.json.Decoder[T], *, absent: bytes = b""
) -> T:
    """Return the decoded body, `absent` if it is empty. Raises ApiError, ClientGone, ValidationError."""
    limits = services.settings.limits
    return decode(await read_body(request.scope, request.receive, limits) or absent, decoder, limits)


async def read_text(request: Request, limits: RequestLimits) -> bytes:
    """Return the body of a request for a text's work. Raises ApiError, ClientGone."""
    return await read_body(request.scope, request.receive, limits, limit_bytes=limits.text_bytes)
