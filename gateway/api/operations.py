"""The table of all operations: the one place that names a route, its description and its handler."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from gateway.api.admin_archive import ArchiveRoutes
from gateway.api.admin_audit import AuditRoutes
from gateway.api.admin_cluster import ClusterAdmin
from gateway.api.admin_functions import FunctionAdmin
from gateway.api.admin_keys import KeyAdmin
from gateway.api.admin_secrets import SecretAdmin
from gateway.api.admin_usage import UsageRoutes
from gateway.api.routes_embeddings import EmbeddingRoutes
from gateway.api.routes_functions import FunctionRoutes
from gateway.api.routes_generate import GenerateRoutes
from gateway.api.routes_models import ModelRoutes
from gateway.api.routes_system import SystemRoutes
from gateway.api.uploads import BlobRoutes
from gateway.core.rights import Right
from gateway.schemas import admin, answers
from gateway.schemas import parameters as p
from gateway.schemas.casts import CastList
from gateway.schemas.functions import ClassifyRequest, ClassifyResponse, FeaturesRequest, FeaturesResponse
from gateway.schemas.openai import ChatRequest, CompletionRequest, EmbeddingRequest, ModelCard, ModelList
from gateway.schemas.operations import (
    BYTES,
    CSV,
    EVENTS,
    JSON,
    LINES,
    PARQUET,
    TEXT,
    Audit,
    Handler,
    Operation,
)
from registry.records.usage import PriceRate, RequestRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Handlers:
    """The handlers of one gateway."""

    generate: GenerateRoutes
    embed: EmbeddingRoutes
    functions: FunctionRoutes
    models: ModelRoutes
    system: SystemRoutes
    blobs: BlobRoutes
    admin: FunctionAdmin
    cluster: ClusterAdmin
    keys: KeyAdmin
    secrets: SecretAdmin
    usage: UsageRoutes
    archive: ArchiveRoutes
    audit: AuditRoutes


Select = Callable[[Handlers], Handler]


def _open(
    path: str, handler: Select, summary: str, answer: type | None = None, *others: str
) -> Operation[Handlers]:
    return Operation("get", path, handler, summary, answer, needs=Right.NONE, others=others)


def _call(
    path: str, handler: Select, summary: str, body: type, answer: type, *others: str
) -> Operation[Handlers]:
    return Operation(
        "post", path, handler, summary, answer, needs=Right.CALL, body=body, others=others, calls=True
    )


def _on_function(
    method: str, path: str, handler: Select, summary: str, answer: type | None, *failures: int, **more: Any
) -> Operation[Handlers]:
    """Return an operation on the function that the path names, by default one that changes it.

    A body may be missing.
    """
    return Operation(
        method,
        f"/admin/functions/{{name}}{path}",
        handler,
        summary,
        answer,
        needs=more.pop("needs", Right.MANAGE_FUNCTIONS),
        parameters=(p.FUNCTION_NAME, *more.pop("parameters", ())),
        failures=(404, *failures),
        empty_body="body" in more,
        **more,
    )


_WAITS = (400, 409, 503, 504)

# The JSON of the generic invoke, by the function's task.
_INVOKE_BODIES = (CompletionRequest, ChatRequest, EmbeddingRequest, ClassifyRequest, FeaturesRequest)
_INVOKE_ANSWERS = (
    answers.CompletionResponse,
    answers.ChatCompletionResponse,
    answers.EmbeddingList,
    ClassifyResponse,
    FeaturesResponse,
)

OPERATIONS: tuple[Operation[Handlers], ...] = (
    _call(
        "/v1/chat/completions",
        lambda to: to.generate.chat,
        "Continue a conversation",
        ChatRequest,
        answers.ChatCompletionResponse,
        EVENTS,
    ),
    _call(
        "/v1/completions",
        lambda to: to.generate.completions,
        "Continue a text or token ids",
        CompletionRequest,
        answers.CompletionResponse,
        EVENTS,
    ),
    _call(
        "/v1/embeddings",
        lambda to: to.embed.embeddings,
        "Vectors of texts or token ids",
        EmbeddingRequest,
        answers.EmbeddingList,
    ),
    Operation("get", "/v1/models", lambda to: to.models.models, "The functions", ModelList, needs=Right.CALL),
    Operation(
        "get",
        "/v1/models/{model}",
        lambda to: to.models.model,
        "One function",
        ModelCard,
        needs=Right.CALL,
        parameters=(p.MODEL,),
        failures=(404,),
    ),
    Operation(
        "post",
        "/functions/{function}/invoke",
        lambda to: to.functions.invoke,
        "Call any function; the body depends on its task",
        needs=Right.CALL,
        body=(JSON, "image/*"),
        others=(JSON, EVENTS),
        any_body=_INVOKE_BODIES,
        any_answer=_INVOKE_ANSWERS,
        parameters=(p.FUNCTION_SPEC, p.TOP_K),
        calls=True,
    ),
    Operation(
        "post",
        "/admin/functions",
        lambda to: to.admin.create,
        "Register a version",
        admin.CreatedFunction,
        needs=Right.MANAGE_FUNCTIONS,
        body=admin.CreateFunction,
        empty_body=True,
        status=201,
        failures=(*_WAITS, 507),
        audit=Audit("function.deploy", target="name", made="version"),
    ),
    Operation(
        "get",
        "/admin/functions",
        lambda to: to.admin.list_all,
        "The functions that the key may see",
        answers.FunctionList,
        needs=Right.READ_FUNCTIONS,
    ),
    _on_function(
        "get",
        "",
        lambda to: to.admin.show,
        "One function",
        answers.FunctionView,
        needs=Right.READ_FUNCTIONS,
    ),
    _on_function(
        "patch",
        "",
        lambda to: to.admin.change,
        "Change its scaling",
        answers.FunctionView,
        409,
        body=admin.PatchFunction,
        audit=Audit("function.change"),
    ),
    _on_function(
        "delete",
        "",
        lambda to: to.admin.delete,
        "Delete it",
        answers.DeletedFunction,
        409,
        audit=Audit("function.delete"),
    ),
    _on_function(
        "post",
        "/rollback",
        lambda to: to.admin.rollback,
        "Make an earlier version current",
        answers.FunctionView,
        *_WAITS,
        body=admin.RollbackRequest,
        audit=Audit("function.rollback"),
    ),
    _on_function(
        "post",
        "/scale",
        lambda to: to.cluster.scale,
        "Set its number of instances once",
        answers.ScaledFunction,
        *_WAITS,
        body=admin.ScaleRequest,
        audit=Audit("function.scale"),
    ),
    _on_function(
        "post",
        "/warm",
        lambda to: to.cluster.warm,
        "Load its image into host memory",
        None,
        *_WAITS,
        body=admin.WarmRequest,
        others=(LINES,),
        audit=Audit("function.warm"),
    ),
    _on_function(
        "post",
        "/drop",
        lambda to: to.cluster.drop,
        "Drop its idle image",
        answers.DroppedImage,
        *_WAITS,
        body=admin.DropRequest,
        audit=Audit("function.evict"),
    ),
    _on_function(
        "get",
        "/logs",
        lambda to: to.cluster.logs,
        "Its log lines",
        None,
        422,
        others=(TEXT,),
        follows=True,
        parameters=(p.LINES, p.FOLLOW),
    ),
    Operation(
        "get",
        "/admin/functions/{name}/secrets",
        lambda to: to.secrets.list_all,
        "Its secrets, without values",
        answers.SecretList,
        needs=Right.ADMIN,
        parameters=(p.FUNCTION_NAME,),
        failures=(422,),
    ),
    Operation(
        "put",
        "/admin/functions/{name}/secrets/{key}",
        lambda to: to.secrets.put,
        "Set or replace a secret",
        answers.SecretView,
        needs=Right.ADMIN,
        audit=Audit("secret.set"),
        body=admin.PutSecret,
        parameters=(p.FUNCTION_NAME, p.SECRET_KEY),
        failures=(409,),
    ),
    Operation(
        "delete",
        "/admin/functions/{name}/secrets/{key}",
        lambda to: to.secrets.delete,
        "Delete a secret",
        answers.SecretView,
        audit=Audit("secret.delete"),
        needs=Right.ADMIN,
        parameters=(p.FUNCTION_NAME, p.SECRET_KEY),
        failures=(404, 409, 422),
    ),
    Operation(
        "post",
        "/admin/secrets/reencrypt",
        lambda to: to.secrets.reencrypt,
        "Encrypt all secrets with the newest cluster secret",
        answers.ReencryptedSecrets,
        audit=Audit("secret.reencrypt"),
        needs=Right.ADMIN,
        failures=(409,),
    ),
    Operation(
        "post",
        "/admin/blobs/missing",
        lambda to: to.blobs.missing,
        "Which blobs the store lacks",
        admin.MissingAnswer,
        needs=Right.MANAGE_FUNCTIONS,
        body=admin.MissingBlobs,
        unaudited="it reads, and keeps blobs from collection for a while",
    ),
    *(
        Operation(
            method,
            "/admin/blobs/{digest}",
            lambda to: to.blobs.status,
            "The status of a blob",
            answers.BlobStatus,
            needs=Right.MANAGE_FUNCTIONS,
            parameters=(p.DIGEST,),
            failures=(422,),
        )
        for method in ("get", "head")
    ),
    Operation(
        "patch",
        "/admin/blobs/{digest}",
        lambda to: to.blobs.append,
        "Add bytes to an upload",
        answers.BlobProgress,
        needs=Right.MANAGE_FUNCTIONS,
        body=(BYTES,),
        parameters=(p.DIGEST, p.UPLOAD_OFFSET, p.UPLOAD_LENGTH),
        failures=(409, 507),
        streamed_body=True,
        audit=Audit("blob.upload"),
    ),
    Operation(
        "get",
        "/admin/nodes",
        lambda to: to.cluster.nodes,
        "The nodes",
        answers.NodeList,
        needs=Right.READ_CLUSTER,
    ),
    Operation(
        "get",
        "/admin/instances",
        lambda to: to.cluster.instances,
        "The instances",
        answers.InstanceList,
        needs=Right.READ_CLUSTER,
    ),
    Operation(
        "get",
        "/admin/casts",
        lambda to: to.cluster.casts,
        "The casts of images, with the progress of each node",
        CastList,
        needs=Right.READ_CLUSTER,
        parameters=(p.OF_FUNCTION, p.OF_CAST, p.SUMMARY),
        failures=(422,),
    ),
    Operation(
        "get",
        "/admin/keys",
        lambda to: to.keys.list_keys,
        "The API keys",
        answers.KeyList,
        needs=Right.ADMIN,
    ),
    Operation(
        "post",
        "/admin/keys",
        lambda to: to.keys.create_key,
        "Create a key",
        answers.NewKey,
        needs=Right.ADMIN,
        body=admin.CreateKey,
        status=201,
        audit=Audit("key.create", target="tenant", made="id"),
    ),
    Operation(
        "patch",
        "/admin/keys/{key_id}",
        lambda to: to.keys.change_key,
        "Set or lift a key's limits",
        answers.KeyView,
        needs=Right.ADMIN,
        body=admin.PatchKey,
        parameters=(p.KEY_ID,),
        failures=(404, 409),
        audit=Audit("key.change"),
    ),
    Operation(
        "post",
        "/admin/keys/{key_id}/rotate",
        lambda to: to.keys.rotate_key,
        "Create a key like this one, which then expires",
        answers.RotatedKey,
        needs=Right.ADMIN,
        audit=Audit("key.rotate", made="id"),
        body=admin.RotateKey,
        parameters=(p.KEY_ID,),
        status=201,
        failures=(404, 409),
    ),
    Operation(
        "delete",
        "/admin/keys/{key_id}",
        lambda to: to.keys.revoke_key,
        "Revoke a key",
        answers.KeyView,
        needs=Right.ADMIN,
        parameters=(p.KEY_ID,),
        failures=(404, 409),
        audit=Audit("key.revoke"),
    ),
    Operation(
        "get",
        "/admin/prices",
        lambda to: to.keys.list_prices,
        "The price table",
        answers.RateList,
        needs=Right.READ_LEDGER,
    ),
    Operation(
        "post",
        "/admin/prices",
        lambda to: to.keys.create_price,
        "Add a price",
        PriceRate,
        needs=Right.ADMIN,
        body=admin.CreateRate,
        status=201,
        failures=(409,),
        audit=Audit("price.create", target="id"),
    ),
    Operation(
        "get",
        "/admin/usage/report",
        lambda to: to.usage.report,
        "Sums by function and tenant, or by other properties",
        answers.UsageReport,
        needs=Right.READ_USAGE,
        others=(CSV, PARQUET),
        parameters=(p.GROUP_BY, p.SINCE, p.UNTIL, p.OF_FUNCTION, p.OF_TENANT, p.OF_KEY, p.FORMAT),
        failures=(422,),
        rated=True,
    ),
    Operation(
        "get",
        "/admin/usage/summary",
        lambda to: to.usage.summary,
        "A summary of a period by function and tenant",
        answers.UsageSummary,
        needs=Right.READ_USAGE,
        parameters=(p.SINCE, p.UNTIL, p.OF_FUNCTION, p.OF_TENANT),
        failures=(422,),
        rated=True,
    ),
    Operation(
        "get",
        "/admin/usage/gpu-time",
        lambda to: to.usage.gpu_time,
        "Accelerator time: allocated, attributed, loading, idle, lost",
        answers.GpuTimeReport,
        needs=Right.READ_USAGE,
        others=(CSV, PARQUET),
        parameters=(p.GPU_BY, p.SINCE, p.UNTIL, p.OF_FUNCTION, p.OF_TENANT, p.RESOLUTION, p.FORMAT),
        failures=(422,),
        rated=True,
    ),
    Operation(
        "get",
        "/admin/usage/check",
        lambda to: to.usage.check,
        "The audit of the ledger",
        answers.UsageAudit,
        needs=Right.READ_LEDGER,
        parameters=(p.SINCE, p.UNTIL),
        failures=(422,),
    ),
    Operation(
        "get",
        "/admin/usage/show/{request_id}",
        lambda to: to.usage.show,
        "One request's record",
        RequestRecord,
        needs=Right.READ_USAGE,
        parameters=(p.REQUEST_ID,),
        failures=(404,),
        rated=True,
    ),
    Operation(
        "get",
        "/admin/usage/archive",
        lambda to: to.archive.files,
        "The files of the ledger's archive",
        answers.ArchiveList,
        needs=Right.READ_LEDGER,
    ),
    Operation(
        "post",
        "/admin/usage/archive",
        lambda to: to.archive.archive,
        "Move closed days of the ledger from Redis to the archive",
        needs=Right.ADMIN,
        body=admin.ArchiveUsage,
        empty_body=True,
        others=(LINES,),
        failures=(409, 422, 507),
        audit=Audit("usage.archive"),
    ),
    Operation(
        "post",
        "/admin/usage/delete",
        lambda to: to.archive.delete,
        "Delete a tenant's data from all records; the sums stay",
        needs=Right.ADMIN,
        body=admin.DeleteUsage,
        others=(LINES,),
        failures=(409, 422, 507),
        audit=Audit("usage.delete", target="tenant"),
    ),
    Operation(
        "get",
        "/admin/audit",
        lambda to: to.audit.entries,
        "The audit log of changes, the latest first",
        answers.AuditAnswer,
        needs=Right.ADMIN,
        parameters=(p.AUDIT_LOG, p.SINCE, p.UNTIL, p.OF_KEY, p.OF_OPERATION, p.LIMIT, p.CURSOR),
        failures=(422,),
    ),
    _open("/", lambda to: to.system.index, "What this service is", answers.ServiceIndex),
    _open("/livez", lambda to: to.system.livez, "Liveness", answers.Liveness),
    _open("/readyz", lambda to: to.system.readyz, "Readiness", answers.Readiness),
    _open("/health", lambda to: to.system.health, "A summary", answers.Health),
    _open("/metrics", lambda to: to.system.metrics, "Prometheus metrics", None, TEXT),
    _open("/openapi.json", lambda to: to.system.openapi, "This document", None, JSON),
)

# What a gateway with --metrics-port serves there, and what it then serves of that on the port of its clients.
WATCHED = tuple(op for op in OPERATIONS if op.path in ("/livez", "/readyz", "/health", "/metrics"))
_METRICS_APART: dict[str, dict[str, Any]] = {
    "/metrics": {"needs": Right.ADMIN},
    "/readyz": {"handler": lambda to: to.system.readyz_status},
    "/health": {"handler": lambda to: to.system.status, "answer": answers.HealthStatus},
}


def client_operations(*, metrics_apart: bool) -> tuple[Operation[Handlers], ...]:
    """Return the operations on the port of the clients."""
    if not metrics_apart:
        return OPERATIONS
    return tuple(replace(op, **_METRICS_APART.get(op.path, {})) for op in OPERATIONS)
