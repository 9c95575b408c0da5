"""The table of all operations: the one place that names a route, its description and its handler."""

from collections.abc import Callable
from dataclasses import dataclass

from gateway.api.admin_cluster import ClusterAdmin
from gateway.api.admin_functions import FunctionAdmin
from gateway.api.admin_keys import KeyAdmin
from gateway.api.admin_usage import UsageRoutes
from gateway.api.routes_embeddings import EmbeddingRoutes
from gateway.api.routes_functions import FunctionRoutes
from gateway.api.routes_generate import GenerateRoutes
from gateway.api.routes_models import ModelRoutes
from gateway.api.routes_system import SystemRoutes
from gateway.api.uploads import BlobRoutes
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
    Handler,
    Operation,
    RequiredKey,
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
    usage: UsageRoutes


Select = Callable[[Handlers], Handler]


def _open(
    path: str, handler: Select, summary: str, answer: type | None = None, *others: str
) -> Operation[Handlers]:
    return Operation(
        method="get",
        path=path,
        handler=handler,
        summary=summary,
        tag="system",
        needs=RequiredKey.NOTHING,
        answer=answer,
        others=others,
    )


def _call(
    path: str, handler: Select, summary: str, body: type, answer: type, *others: str
) -> Operation[Handlers]:
    return Operation(
        method="post",
        path=path,
        handler=handler,
        summary=summary,
        tag="openai",
        needs=RequiredKey.KEY,
        body=body,
        answer=answer,
        others=others,
        calls=True,
    )


_F = "/admin/functions/{name}"
_NAMED = (p.FUNCTION_NAME,)
_WAITS = (400, 409, 503, 504)

# The JSON of the generic invoke, by the function's task.
_INVOKE_BODIES = (
    CompletionRequest,
    ChatRequest,
    EmbeddingRequest,
    ClassifyRequest,
    FeaturesRequest,
)
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
    Operation(
        method="get",
        path="/v1/models",
        handler=lambda to: to.models.models,
        summary="The functions",
        tag="openai",
        needs=RequiredKey.KEY,
        answer=ModelList,
    ),
    Operation(
        method="get",
        path="/v1/models/{model}",
        handler=lambda to: to.models.model,
        summary="One function",
        tag="openai",
        needs=RequiredKey.KEY,
        answer=ModelCard,
        parameters=(p.MODEL,),
        failures=(404,),
    ),
    Operation(
        method="post",
        path="/functions/{function}/invoke",
        handler=lambda to: to.functions.invoke,
        summary="Call any function; the body depends on its task",
        tag="functions",
        needs=RequiredKey.KEY,
        body=(JSON, "image/*"),
        others=(JSON, EVENTS),
        any_body=_INVOKE_BODIES,
        any_answer=_INVOKE_ANSWERS,
        parameters=(p.FUNCTION_SPEC, p.TOP_K),
        calls=True,
    ),
    Operation(
        method="post",
        path="/admin/functions",
        handler=lambda to: to.admin.create,
        summary="Register a version",
        tag="admin",
        body=admin.CreateFunction,
        empty_body=True,
        answer=admin.CreatedFunction,
        status=201,
        failures=(*_WAITS, 507),
    ),
    Operation(
        method="get",
        path="/admin/functions",
        handler=lambda to: to.admin.list_all,
        summary="All functions",
        tag="admin",
        answer=answers.FunctionList,
    ),
    Operation(
        method="get",
        path=_F,
        handler=lambda to: to.admin.show,
        summary="One function",
        tag="admin",
        answer=answers.FunctionView,
        parameters=_NAMED,
        failures=(404,),
    ),
    Operation(
        method="patch",
        path=_F,
        handler=lambda to: to.admin.change,
        summary="Change its scaling",
        tag="admin",
        body=admin.PatchFunction,
        empty_body=True,
        answer=answers.FunctionView,
        parameters=_NAMED,
        failures=(404, 409),
    ),
    Operation(
        method="delete",
        path=_F,
        handler=lambda to: to.admin.delete,
        summary="Delete it",
        tag="admin",
        answer=answers.DeletedFunction,
        parameters=_NAMED,
        failures=(404, 409),
    ),
    Operation(
        method="post",
        path=f"{_F}/rollback",
        handler=lambda to: to.admin.rollback,
        summary="Make an earlier version current",
        tag="admin",
        body=admin.RollbackRequest,
        empty_body=True,
        answer=answers.FunctionView,
        parameters=_NAMED,
        failures=(404, *_WAITS),
    ),
    Operation(
        method="post",
        path=f"{_F}/scale",
        handler=lambda to: to.cluster.scale,
        summary="Set its number of instances once",
        tag="admin",
        body=admin.ScaleRequest,
        empty_body=True,
        answer=answers.ScaledFunction,
        parameters=_NAMED,
        failures=(404, *_WAITS),
    ),
    Operation(
        method="post",
        path=f"{_F}/warm",
        handler=lambda to: to.cluster.warm,
        summary="Load its image into host memory",
        tag="admin",
        body=admin.WarmRequest,
        empty_body=True,
        others=(LINES,),
        parameters=_NAMED,
        failures=(404, *_WAITS),
    ),
    Operation(
        method="post",
        path=f"{_F}/drop",
        handler=lambda to: to.cluster.drop,
        summary="Drop its idle image",
        tag="admin",
        body=admin.DropRequest,
        empty_body=True,
        answer=answers.DroppedImage,
        parameters=_NAMED,
        failures=(404, *_WAITS),
    ),
    Operation(
        method="get",
        path=f"{_F}/logs",
        handler=lambda to: to.cluster.logs,
        summary="Its log lines",
        tag="admin",
        others=(TEXT,),
        follows=True,
        parameters=(*_NAMED, p.LINES, p.FOLLOW),
        failures=(404, 422),
    ),
    Operation(
        method="post",
        path="/admin/blobs/missing",
        handler=lambda to: to.blobs.missing,
        summary="Which blobs the store lacks",
        tag="blobs",
        body=admin.MissingBlobs,
        answer=admin.MissingAnswer,
    ),
    *(
        Operation(
            method=method,
            path="/admin/blobs/{digest}",
            handler=lambda to: to.blobs.status,
            summary="The status of a blob",
            tag="blobs",
            answer=answers.BlobStatus,
            parameters=(p.DIGEST,),
            failures=(422,),
        )
        for method in ("get", "head")
    ),
    Operation(
        method="patch",
        path="/admin/blobs/{digest}",
        handler=lambda to: to.blobs.append,
        summary="Add bytes to an upload",
        tag="blobs",
        body=(BYTES,),
        answer=answers.BlobProgress,
        parameters=(p.DIGEST, p.UPLOAD_OFFSET, p.UPLOAD_LENGTH),
        failures=(409, 507),
        streamed_body=True,
    ),
    Operation(
        method="get",
        path="/admin/nodes",
        handler=lambda to: to.cluster.nodes,
        summary="The nodes",
        tag="admin",
        answer=answers.NodeList,
    ),
    Operation(
        method="get",
        path="/admin/instances",
        handler=lambda to: to.cluster.instances,
        summary="The instances",
        tag="admin",
        answer=answers.InstanceList,
    ),
    Operation(
        method="get",
        path="/admin/casts",
        handler=lambda to: to.cluster.casts,
        summary="The casts of images, with the progress of each node",
        tag="admin",
        answer=CastList,
        parameters=(p.OF_FUNCTION, p.OF_CAST, p.SUMMARY),
        failures=(422,),
    ),
    Operation(
        method="get",
        path="/admin/keys",
        handler=lambda to: to.keys.list_keys,
        summary="The API keys",
        tag="admin",
        answer=answers.KeyList,
    ),
    Operation(
        method="post",
        path="/admin/keys",
        handler=lambda to: to.keys.create_key,
        summary="Create a key",
        tag="admin",
        body=admin.CreateKey,
        answer=answers.NewKey,
        status=201,
    ),
    Operation(
        method="patch",
        path="/admin/keys/{key_id}",
        handler=lambda to: to.keys.change_key,
        summary="Set or lift a key's limits",
        tag="admin",
        body=admin.PatchKey,
        answer=answers.KeyView,
        parameters=(p.KEY_ID,),
        failures=(404, 409),
    ),
    Operation(
        method="delete",
        path="/admin/keys/{key_id}",
        handler=lambda to: to.keys.revoke_key,
        summary="Revoke a key",
        tag="admin",
        answer=answers.KeyView,
        parameters=(p.KEY_ID,),
        failures=(404,),
    ),
    Operation(
        method="get",
        path="/admin/prices",
        handler=lambda to: to.keys.list_prices,
        summary="The price table",
        tag="admin",
        answer=answers.RateList,
    ),
    Operation(
        method="post",
        path="/admin/prices",
        handler=lambda to: to.keys.create_price,
        summary="Add a price",
        tag="admin",
        body=admin.CreateRate,
        answer=PriceRate,
        status=201,
        failures=(409,),
    ),
    Operation(
        method="get",
        path="/admin/usage/report",
        handler=lambda to: to.usage.report,
        summary="Sums by function and tenant, or by other properties",
        tag="usage",
        needs=RequiredKey.KEY,
        answer=answers.UsageReport,
        others=(CSV, PARQUET),
        parameters=(p.GROUP_BY, p.SINCE, p.UNTIL, p.OF_FUNCTION, p.OF_TENANT, p.OF_KEY, p.FORMAT),
        failures=(422,),
    ),
    Operation(
        method="get",
        path="/admin/usage/summary",
        handler=lambda to: to.usage.summary,
        summary="A summary of a period by function and tenant",
        tag="usage",
        needs=RequiredKey.KEY,
        answer=answers.UsageSummary,
        parameters=(p.SINCE, p.UNTIL, p.OF_FUNCTION, p.OF_TENANT),
        failures=(422,),
    ),
    Operation(
        method="get",
        path="/admin/usage/gpu-time",
        handler=lambda to: to.usage.gpu_time,
        summary="Accelerator time: allocated, attributed, loading, idle, lost",
        tag="usage",
        needs=RequiredKey.KEY,
        answer=answers.GpuTimeReport,
        others=(CSV, PARQUET),
        parameters=(p.GPU_BY, p.SINCE, p.UNTIL, p.OF_FUNCTION, p.OF_TENANT, p.RESOLUTION, p.FORMAT),
        failures=(422,),
    ),
    Operation(
        method="get",
        path="/admin/usage/check",
        handler=lambda to: to.usage.check,
        summary="The audit of the ledger",
        tag="usage",
        answer=answers.UsageAudit,
        parameters=(p.SINCE, p.UNTIL),
        failures=(422,),
    ),
    Operation(
        method="get",
        path="/admin/usage/show/{request_id}",
        handler=lambda to: to.usage.show,
        summary="One request's record",
        tag="usage",
        needs=RequiredKey.KEY,
        answer=RequestRecord,
        parameters=(p.REQUEST_ID,),
        failures=(404,),
    ),
    _open("/", lambda to: to.system.index, "What this service is", answers.ServiceIndex),
    _open("/livez", lambda to: to.system.livez, "Liveness", answers.Liveness),
    _open("/readyz", lambda to: to.system.readyz, "Readiness", answers.Readiness),
    _open("/health", lambda to: to.system.health, "A summary", answers.Health),
    _open("/metrics", lambda to: to.system.metrics, "Prometheus metrics", None, TEXT),
    _open("/openapi.json", lambda to: to.system.openapi, "This document", None, JSON),
)
