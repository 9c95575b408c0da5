"""The ASGI application: the handlers behind the routes of the table, and the layer around them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api.admin_archive import ArchiveRoutes
from gateway.api.admin_audit import AuditRoutes
from gateway.api.admin_cluster import ClusterAdmin
from gateway.api.admin_functions import FunctionAdmin
from gateway.api.admin_keys import KeyAdmin
from gateway.api.admin_rollouts import RolloutAdmin
from gateway.api.admin_secrets import SecretAdmin
from gateway.api.admin_usage import UsageRoutes
from gateway.api.blob_collector import BlobCollector
from gateway.api.handlers import Handlers
from gateway.api.operations import OPERATIONS, WATCHED, client_operations
from gateway.api.routes_batches import BatchRoutes
from gateway.api.routes_embeddings import EmbeddingRoutes
from gateway.api.routes_files import FileRoutes
from gateway.api.routes_functions import FunctionRoutes
from gateway.api.routes_generate import GenerateRoutes
from gateway.api.routes_inference import InferenceRoutes
from gateway.api.routes_messages import MessageRoutes
from gateway.api.routes_models import ModelRoutes
from gateway.api.routes_predictions import PredictionRoutes
from gateway.api.routes_quote import QuoteRoutes
from gateway.api.routes_rerank import RerankRoutes
from gateway.api.routes_responses import ResponseRoutes
from gateway.api.routes_system import SystemRoutes
from gateway.api.routes_tokens import TokenRoutes
from gateway.api.routes_ui import UiRoutes
from gateway.api.routes_watch import WatchRoutes
from gateway.api.uploads import BlobRoutes
from gateway.core.errors import ApiError
from gateway.http.responses import raw_json
from gateway.requests.middleware import RequestMiddleware
from gateway.requests.routing import Router
from gateway.requests.services import Services
from gateway.schemas.document import document
from gateway.schemas.operations import Handler, Operation
from registry.archive.archive import LedgerArchive


def make_app(
    services: Services, collector: BlobCollector, archive: LedgerArchive | None = None
) -> RequestMiddleware:
    """Return the ASGI application of one gateway."""
    operations = client_operations(metrics_apart=services.settings.metrics_port is not None)
    handlers = make_handlers(services, collector, archive, operations)
    return RequestMiddleware(Router(operations, handlers, _around(services)), services)


def _around(services: Services) -> Callable[[Operation[Handlers], Handler], Handler]:
    """Return what adds the audit log and the rate of its key to a handler that declares them."""

    def around(operation: Operation[Handlers], handler: Handler) -> Handler:
        handler = services.changes.recorded(operation, handler)
        return services.quotas.rated(handler) if operation.rated else handler

    return around


@dataclass(frozen=True, slots=True)
class _OpenApp:
    """Routes without keys, limits and log lines."""

    router: Router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.router.find(scope)(scope, receive, send)
        except ApiError as error:
            await raw_json(error.envelope(), status=error.status)(scope, receive, send)


def make_metrics_app(services: Services, collector: BlobCollector) -> ASGIApp:
    """Return the application of the metrics port."""
    return _OpenApp(Router(WATCHED, make_handlers(services, collector)))


def make_handlers(
    services: Services,
    collector: BlobCollector,
    archive: LedgerArchive | None = None,
    operations: tuple[Operation[Handlers], ...] = OPERATIONS,
) -> Handlers:
    """Return the handlers of one gateway."""
    generate, embed = GenerateRoutes(services), EmbeddingRoutes(services)
    functions = FunctionRoutes(services, generate, embed)
    tokens, system = TokenRoutes(services), SystemRoutes(services, partial(document, operations))
    return Handlers(
        generate=generate,
        embed=embed,
        messages=MessageRoutes(services, generate, tokens),
        responses=ResponseRoutes(services, generate),
        rerank=RerankRoutes(services),
        tokens=tokens,
        inference=InferenceRoutes(services, system),
        functions=functions,
        models=ModelRoutes(services),
        quotes=QuoteRoutes(services, functions),
        system=system,
        blobs=BlobRoutes(services, collector),
        admin=FunctionAdmin(services, collector),
        cluster=ClusterAdmin(services),
        rollouts=RolloutAdmin(services),
        keys=KeyAdmin(services),
        secrets=SecretAdmin(services),
        usage=UsageRoutes(services, None if archive is None else archive.ledger),
        archive=ArchiveRoutes(services, archive),
        audit=AuditRoutes(services),
        watch=WatchRoutes(services),
        ui=UiRoutes(),
        predictions=PredictionRoutes(services),
        files=FileRoutes(services),
        batches=BatchRoutes(services),
    )
