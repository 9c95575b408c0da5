"""The handlers of one gateway, from which the table of operations selects."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from gateway.api.admin_archive import ArchiveRoutes
from gateway.api.admin_audit import AuditRoutes
from gateway.api.admin_cluster import ClusterAdmin
from gateway.api.admin_functions import FunctionAdmin
from gateway.api.admin_keys import KeyAdmin
from gateway.api.admin_rollouts import RolloutAdmin
from gateway.api.admin_secrets import SecretAdmin
from gateway.api.admin_usage import UsageRoutes
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
from gateway.schemas.operations import Handler


@dataclass(frozen=True, slots=True, kw_only=True)
class Handlers:
    """The handlers of one gateway."""

    generate: GenerateRoutes
    embed: EmbeddingRoutes
    messages: MessageRoutes
    responses: ResponseRoutes
    rerank: RerankRoutes
    tokens: TokenRoutes
    inference: InferenceRoutes
    functions: FunctionRoutes
    models: ModelRoutes
    quotes: QuoteRoutes
    system: SystemRoutes
    blobs: BlobRoutes
    admin: FunctionAdmin
    cluster: ClusterAdmin
    rollouts: RolloutAdmin
    keys: KeyAdmin
    secrets: SecretAdmin
    usage: UsageRoutes
    archive: ArchiveRoutes
    audit: AuditRoutes
    watch: WatchRoutes
    ui: UiRoutes
    predictions: PredictionRoutes
    files: FileRoutes
    batches: BatchRoutes


Select: TypeAlias = Callable[[Handlers], Handler]
