"""The ASGI application: the handlers behind the routes of the table, and the layer around them."""

from functools import partial

from gateway.api.admin_archive import ArchiveRoutes
from gateway.api.admin_cluster import ClusterAdmin
from gateway.api.admin_functions import FunctionAdmin
from gateway.api.admin_keys import KeyAdmin
from gateway.api.admin_secrets import SecretAdmin
from gateway.api.admin_usage import UsageRoutes
from gateway.api.blob_collector import BlobCollector
from gateway.api.operations import OPERATIONS, Handlers
from gateway.api.routes_embeddings import EmbeddingRoutes
from gateway.api.routes_functions import FunctionRoutes
from gateway.api.routes_generate import GenerateRoutes
from gateway.api.routes_models import ModelRoutes
from gateway.api.routes_system import SystemRoutes
from gateway.api.uploads import BlobRoutes
from gateway.requests.middleware import RequestMiddleware
from gateway.requests.routing import Router
from gateway.requests.services import Services
from gateway.schemas.document import document
from registry.archive.archive import LedgerArchive


def make_app(
    services: Services, collector: BlobCollector, archive: LedgerArchive | None = None
) -> RequestMiddleware:
    """Return the ASGI application of one gateway."""
    return RequestMiddleware(Router(OPERATIONS, make_handlers(services, collector, archive)), services)


def make_handlers(
    services: Services, collector: BlobCollector, archive: LedgerArchive | None = None
) -> Handlers:
    """Return the handlers of one gateway."""
    generate, embed = GenerateRoutes(services), EmbeddingRoutes(services)
    return Handlers(
        generate=generate,
        embed=embed,
        functions=FunctionRoutes(services, generate, embed),
        models=ModelRoutes(services),
        system=SystemRoutes(services, partial(document, OPERATIONS)),
        blobs=BlobRoutes(services, collector),
        admin=FunctionAdmin(services, collector),
        cluster=ClusterAdmin(services),
        keys=KeyAdmin(services),
        secrets=SecretAdmin(services),
        usage=UsageRoutes(services, None if archive is None else archive.ledger),
        archive=ArchiveRoutes(services, archive),
    )
