"""Routes from the table of operations: a request's method and path to its handler."""

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from gateway.core.errors import ApiError
from gateway.core.rights import Right
from gateway.http.responses import json_response
from gateway.schemas.operations import Audit, Handler, Operation

H = TypeVar("H")

_ADMIN = "/admin/"
_PARAMETER = re.compile(r"{(\w+)}")
_SUGGEST_RATIO = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A handler with what the layers around it need. Quotas apply, and metrics count, if it is `metered`."""

    handler: Handler
    needs: Right
    path: str = ""  # as the table has it; "" if there is no such endpoint
    metered: bool = True
    status: int = 200
    streamed_body: bool = False
    follows: bool = False
    audit: Audit | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the handler and send its result: an ASGI application, or a struct or record as JSON."""
        result: Any = await self.handler(Request(scope, receive, send))
        if not callable(result):
            result = json_response(result, status=self.status)
        await result(scope, receive, send)


Methods = dict[str, Endpoint]


class Router:
    """The endpoints of all operations.

    Fixed paths are a lookup; others are matched in the table's order among those with their first segment.
    `around` adds to a handler what its operation declares.
    """

    def __init__(
        self,
        operations: Iterable[Operation[H]],
        handlers: H,
        around: Callable[[Operation[H], Handler], Handler] = lambda _, handler: handler,
    ) -> None:
        self._fixed: dict[str, Methods] = {}
        self._patterns: dict[str, list[tuple[re.Pattern[str], Methods]]] = {}  # by first segment
        self._paths: dict[str, Methods] = {}
        for operation in operations:
            methods = self._paths.get(operation.path)
            if methods is None:
                methods = self._paths[operation.path] = {}
                if _PARAMETER.search(operation.path):
                    pattern = re.compile(_PARAMETER.sub(r"(?P<\1>[^/]+)", operation.path))
                    self._patterns.setdefault(_first_segment(operation.path), []).append((pattern, methods))
                else:
                    self._fixed[operation.path] = methods
            methods[operation.method.upper()] = _endpoint(
                operation, around(operation, operation.handler(handlers))
            )

    def __repr__(self) -> str:
        return f"<Router {len(self._paths)} paths>"

    def find(self, scope: Scope) -> Endpoint:
        """Return the endpoint of a request, and set its `path_params`.

        That of an unknown path or method needs a key and raises the error, 404 or 405.
        """
        path, method = scope["path"], scope["method"]
        methods = self._fixed.get(path)
        if methods is None:
            for pattern, found in self._patterns.get(_first_segment(path), ()):
                if match := pattern.fullmatch(path):
                    methods = found
                    scope["path_params"] = match.groupdict()
                    break
            else:
                return _failing(path, self._not_found(method, path))
        endpoint = methods.get(method) or (methods.get("GET") if method == "HEAD" else None)
        return endpoint or _failing(path, _not_allowed(method, path, methods), methods)

    def _not_found(self, method: str, path: str) -> ApiError:
        message = f"there is no endpoint {path!r}"
        nearest = self._nearest(method, path)
        message += f": did you mean {nearest}?" if nearest else "; /openapi.json lists all of them"
        return ApiError(404, "not_found", message)

    def _nearest(self, method: str, path: str) -> str | None:
        """Return the endpoint most like `path`, also where only `/v1` is missing or a slash is added."""
        trimmed = path.rstrip("/")
        for candidate in (trimmed, f"/v1{trimmed}"):
            if candidate in self._paths:
                return candidate
        known = [name for name, methods in self._paths.items() if method in methods] or list(self._paths)
        close = difflib.get_close_matches(trimmed[:256], known, n=1, cutoff=_SUGGEST_RATIO)
        return close[0] if close else None


def _first_segment(path: str) -> str:
    return path[: path.find("/", 1)]


def _endpoint(operation: Operation[H], handler: Handler) -> Endpoint:
    return Endpoint(
        handler=handler,
        needs=operation.needs,
        path=operation.path,
        metered=operation.needs is not Right.NONE
        and not (operation.rated or operation.path.startswith(_ADMIN)),
        status=operation.status,
        streamed_body=operation.streamed_body,
        follows=operation.follows,
        audit=operation.audit,
    )


def _not_allowed(method: str, path: str, methods: Methods) -> ApiError:
    allowed = set(methods) | ({"HEAD"} if "GET" in methods else set())
    listed = ", ".join(sorted(allowed))
    message = f"{path} does not support {method}, only {listed}"
    return ApiError(405, "method_not_allowed", message, headers=(("allow", listed),))


def _failing(path: str, error: ApiError, methods: Methods | None = None) -> Endpoint:
    async def fail(_: Request) -> object:
        raise error

    needs = Right.KEY
    if methods:
        needs = next(iter(methods.values())).needs
    elif path.startswith(_ADMIN):
        needs = Right.ADMIN
    return Endpoint(handler=fail, needs=needs, metered=not path.startswith(_ADMIN))
