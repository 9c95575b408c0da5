"""The ASGI application: routes and the layers around them."""

from collections.abc import Awaitable, Callable, Sequence

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import Match, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.admin_cluster import ClusterAdmin
from gateway.admin_functions import FunctionAdmin
from gateway.admin_keys import KeyAdmin
from gateway.blob_keeper import BlobKeeper
from gateway.middleware import RequestMiddleware
from gateway.routes_embeddings import EmbeddingRoutes
from gateway.routes_functions import FunctionRoutes
from gateway.routes_generate import GenerateRoutes
from gateway.routes_models import ModelRoutes
from gateway.routes_system import SystemRoutes
from gateway.services import Services
from gateway.uploads import BlobRoutes
from gateway.usage_api import UsageRoutes

_INVOKE = ("/functions/", "/invoke")


class App:
    """The application of one gateway: Starlette's router below our middleware.

    The layers of `Starlette` itself are left out: their part, failures, is the middleware's here, and they
    cost a tenth of what a short request does.
    """

    def __init__(self, routes: Sequence[Route], services: Services) -> None:
        self.routes = routes
        # A redirect would lose the body of a POST in many clients; a wrong path is a plain 404.
        self._router = Router(routes, redirect_slashes=False)
        # Calls find their way without a search.
        self._hot = {route.path: route.app for route in routes if isinstance(route.app, Endpoint)}
        self._outermost = RequestMiddleware(self._route, services)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        await self._outermost(scope, receive, send)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST":
            path = scope["path"]
            if path.startswith(_INVOKE[0]) and path.endswith(_INVOKE[1]):
                function = path[len(_INVOKE[0]) : -len(_INVOKE[1])]
                if function and "/" not in function:
                    scope["path_params"] = {"function": function}
                    path = "/functions/{function}/invoke"
            if (endpoint := self._hot.get(path)) is not None:
                await endpoint(scope, receive, send)
                return
        try:
            await self._router(scope, receive, send)
        except HTTPException as error:
            if error.status_code != 405:
                raise
            # Each route knows of its own methods alone.
            raise HTTPException(405, headers={"Allow": ", ".join(self._methods(scope))}) from None

    def _methods(self, scope: Scope) -> list[str]:
        """The methods that a path takes."""
        found = [route.methods or set() for route in self.routes if route.matches(scope)[0] is Match.PARTIAL]
        return sorted(set[str]().union(*found))


class Endpoint:
    """A handler of requests as an application of its own, without the layers that `Route` adds to one."""

    def __init__(self, handler: Callable[[Request], Awaitable[ASGIApp]]) -> None:
        self._handler = handler

    def __repr__(self) -> str:
        return f"<Endpoint {self._handler!r}>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = await self._handler(Request(scope, receive, send))
        await reply(scope, receive, send)


def make_app(services: Services, keeper: BlobKeeper) -> App:
    """The application of one gateway."""
    return App(make_routes(services, keeper), services)


def make_routes(services: Services, keeper: BlobKeeper) -> list[Route]:
    """All routes, those of the hot path first."""
    generate, embed = GenerateRoutes(services), EmbeddingRoutes(services)
    functions, models = FunctionRoutes(services, generate, embed), ModelRoutes(services)
    system, blobs = SystemRoutes(services), BlobRoutes(services, keeper)
    admin, cluster = FunctionAdmin(services, keeper), ClusterAdmin(services)
    keys, usage = KeyAdmin(services), UsageRoutes(services)
    one = "/admin/functions/{name}"
    blob = "/admin/blobs/{digest}"
    return [
        Route("/v1/chat/completions", Endpoint(generate.chat), methods=["POST"]),
        Route("/v1/completions", Endpoint(generate.completions), methods=["POST"]),
        Route("/v1/embeddings", Endpoint(embed.embeddings), methods=["POST"]),
        Route("/v1/models", models.models),
        Route("/v1/models/{model}", models.model),
        Route("/functions/{function}/invoke", Endpoint(functions.invoke), methods=["POST"]),
        Route("/livez", system.livez),
        Route("/readyz", system.readyz),
        Route("/health", system.health),
        Route("/metrics", system.metrics),
        Route("/openapi.json", system.openapi),
        Route("/admin/functions", admin.create, methods=["POST"]),
        Route("/admin/functions", admin.list_all),
        Route(one, admin.show),
        Route(one, admin.change, methods=["PATCH"]),
        Route(one, admin.delete, methods=["DELETE"]),
        Route(f"{one}/rollback", admin.rollback, methods=["POST"]),
        Route(f"{one}/scale", cluster.scale, methods=["POST"]),
        Route(f"{one}/warm", cluster.warm, methods=["POST"]),
        Route(f"{one}/drop", cluster.drop, methods=["POST"]),
        Route(f"{one}/logs", cluster.logs),
        Route("/admin/blobs/missing", blobs.missing, methods=["POST"]),
        Route(blob, blobs.status),
        Route(blob, blobs.append, methods=["PATCH"]),
        Route("/admin/nodes", cluster.nodes),
        Route("/admin/instances", cluster.instances),
        Route("/admin/casts", cluster.casts),
        Route("/admin/keys", keys.list_keys),
        Route("/admin/keys", keys.create_key, methods=["POST"]),
        Route("/admin/keys/{key_id}", keys.change_key, methods=["PATCH"]),
        Route("/admin/keys/{key_id}", keys.revoke_key, methods=["DELETE"]),
        Route("/admin/prices", keys.list_prices),
        Route("/admin/prices", keys.create_price, methods=["POST"]),
        Route("/admin/usage/report", usage.report),
        Route("/admin/usage/summary", usage.summary),
        Route("/admin/usage/gpu-time", usage.gpu_time),
        Route("/admin/usage/check", usage.check),
        Route("/admin/usage/show/{request_id}", usage.show),
    ]
