"""The table of all operations: what names a route, its description and its handler."""

from dataclasses import replace
from typing import Any

from gateway.api.function_operations import FUNCTION_OPERATIONS
from gateway.api.handlers import Handlers, Select
from gateway.api.job_operations import JOB_OPERATIONS
from gateway.api.protocol_operations import PROTOCOL_OPERATIONS
from gateway.api.usage_operations import USAGE_OPERATIONS
from gateway.core.rights import Right
from gateway.schemas import admin, answers
from gateway.schemas import parameters as p
from gateway.schemas.casts import CastList
from gateway.schemas.functions import ClassifyRequest, ClassifyResponse, FeaturesRequest, FeaturesResponse
from gateway.schemas.openai import ChatRequest, CompletionRequest, EmbeddingRequest, ModelCard, ModelList
from gateway.schemas.operations import CSS, EVENTS, HTML, JSON, SCRIPT, SVG, TEXT, Audit, Operation


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


def _on_node(path: str, handler: Select, summary: str, answer: type, **more: Any) -> Operation[Handlers]:
    return Operation(
        "post",
        f"/admin/nodes/{{node}}{path}",
        handler,
        summary,
        answer,
        needs=Right.ADMIN,
        parameters=(p.NODE_ID,),
        failures=(404, 503, 504),
        empty_body="body" in more,
        audit=Audit(f"node.{path.removeprefix('/')}"),
        **more,
    )


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
    Operation(
        "post",
        "/v1/quote",
        lambda to: to.quotes.quote,
        "What a call would cost; the body is that of the call, with its `model`",
        answers.Quote,
        needs=Right.CALL,
        body=(JSON,),
        any_body=_INVOKE_BODIES,
        failures=(404,),
        unaudited="it changes nothing",
    ),
    *PROTOCOL_OPERATIONS,
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
    *JOB_OPERATIONS,
    *FUNCTION_OPERATIONS,
    Operation(
        "get",
        "/admin/nodes",
        lambda to: to.cluster.nodes,
        "The nodes",
        answers.NodeList,
        needs=Right.READ_CLUSTER,
    ),
    _on_node("/cordon", lambda to: to.cluster.cordon, "Start nothing more on it", answers.CordonedNode),
    _on_node("/uncordon", lambda to: to.cluster.uncordon, "Allow starts on it again", answers.CordonedNode),
    _on_node(
        "/drain",
        lambda to: to.cluster.drain,
        "Cordon it, and move what runs there to other nodes",
        answers.DrainedNode,
        body=admin.DrainRequest,
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
        "/admin/me",
        lambda to: to.keys.own_key,
        "The key that the request has, with its rights and limits",
        answers.OwnKey,
        needs=Right.KEY,
    ),
    Operation(
        "get",
        "/admin/watch",
        lambda to: to.watch.watch,
        "The nodes, functions, instances, casts and pipelines that the key may see, and their changes",
        needs=Right.READ_FUNCTIONS,
        others=(EVENTS,),
        parameters=(p.ONCE,),
        failures=(422,),
        follows=True,
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
    *USAGE_OPERATIONS,
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
    _open("/ui", lambda to: to.ui.page, "The console", None, HTML),
    Operation(
        "get",
        "/ui/{file}",
        lambda to: to.ui.file,
        "A file of the console",
        needs=Right.NONE,
        others=(HTML, CSS, SCRIPT, SVG),
        parameters=(p.UI_FILE,),
        failures=(404,),
    ),
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
