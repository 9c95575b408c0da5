"""The ASGI application: routes and the layers around them."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

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


async def _raise(request: Request, error: Exception) -> Response:
    """Leave 404 and 405 of the router to the outermost layer, as all other failures."""
    raise error


def make_app(services: Services, keeper: BlobKeeper) -> Starlette:
    """The application of one gateway."""
    app = Starlette(
        routes=make_routes(services, keeper),
        middleware=[Middleware(RequestMiddleware, services=services)],
        exception_handlers={HTTPException: _raise},
    )
    # A redirect would lose the body of a POST in many clients; a wrong path is a plain 404.
    app.router.redirect_slashes = False
    return app


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
        Route("/v1/chat/completions", generate.chat, methods=["POST"]),
        Route("/v1/completions", generate.completions, methods=["POST"]),
        Route("/v1/embeddings", embed.embeddings, methods=["POST"]),
        Route("/v1/models", models.models),
        Route("/v1/models/{model}", models.model),
        Route("/functions/{function}/invoke", functions.invoke, methods=["POST"]),
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
        Route("/admin/keys", keys.list_keys),
        Route("/admin/keys", keys.create_key, methods=["POST"]),
        Route("/admin/keys/{key_id}", keys.revoke_key, methods=["DELETE"]),
        Route("/admin/prices", keys.list_prices),
        Route("/admin/prices", keys.create_price, methods=["POST"]),
        Route("/admin/usage/report", usage.report),
        Route("/admin/usage/show/{request_id}", usage.show),
    ]
