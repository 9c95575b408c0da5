"""/admin/usage: the bill. Callers see their own tenant's."""

from starlette.requests import Request
from starlette.responses import Response

from gateway import exchange as exchanges
from gateway.auth import admits
from gateway.errors import Forbidden, Unprocessable
from gateway.responses import encoded
from gateway.services import Services
from registry.api_key import Role
from registry.errors import NotFound
from registry.state import UsageFilter


class UsageRoutes:
    """Reports from the ledger."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def report(self, request: Request) -> Response:
        """Sums by function and tenant over `[since, until)` in Unix seconds."""
        key = exchanges.of(request.scope).caller
        query = request.query_params
        tenant = query.get("tenant")
        if key.role is not Role.ADMIN:
            if tenant not in (None, key.tenant):
                raise Forbidden("this key sees the usage of its own tenant only")
            tenant = key.tenant
        where = UsageFilter(
            since=_seconds(request, "since"),
            until=_seconds(request, "until"),
            function=query.get("function"),
            tenant=tenant,
        )
        return encoded({"rows": await self._services.state.report(where)})

    async def show(self, request: Request) -> Response:
        """One request's record."""
        request_id = request.path_params["request_id"]
        record = await self._services.state.request(request_id)
        if not admits(exchanges.of(request.scope).caller, record.tenant):
            # Another tenant's record looks as if it were not there.
            raise NotFound(f"no request {request_id}")
        return encoded(record)


def _seconds(request: Request, name: str) -> float | None:
    text = request.query_params.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e12:
        raise Unprocessable(f"{name} must be a time in Unix seconds", param=name)
    return value
