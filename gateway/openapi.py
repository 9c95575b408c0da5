"""The OpenAPI description of all endpoints, from one table and the schemas of their bodies."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import msgspec

from gateway.schemas_admin import (
    CreatedFunction,
    CreateFunction,
    CreateKey,
    CreateRate,
    Drop,
    MissingAnswer,
    MissingBlobs,
    PatchFunction,
    Rollback,
    Scale,
    Warm,
)
from gateway.schemas_functions import ClassifyRequest, ClassifyResponse, FeaturesRequest, FeaturesResponse
from gateway.schemas_openai import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    ErrorEnvelope,
    Model,
    ModelList,
    Usage,
)
from registry.state import UsageRow
from registry.usage import Rate, RequestRecord

_REF = "#/components/schemas/{name}"
JSON = "application/json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path. `answers` are the media types of its good response."""

    method: str
    path: str
    summary: str
    tag: str
    body: type | None = None
    answer: type | None = None
    answers: tuple[str, ...] = (JSON,)
    status: int = 200
    open: bool = False
    query: tuple[tuple[str, str], ...] = ()
    headers: tuple[str, ...] = ()


def _open(path: str, summary: str, *, media: str = JSON) -> Operation:
    return Operation(method="get", path=path, summary=summary, tag="system", open=True, answers=(media,))


STREAM = (JSON, "text/event-stream")
_F = "/admin/functions/{name}"

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        method="post",
        path="/v1/chat/completions",
        summary="Continue a conversation",
        tag="openai",
        body=ChatRequest,
        answers=STREAM,
    ),
    Operation(
        method="post",
        path="/v1/completions",
        summary="Continue a text or token ids",
        tag="openai",
        body=CompletionRequest,
        answers=STREAM,
    ),
    Operation(
        method="post",
        path="/v1/embeddings",
        summary="Vectors of texts or token ids",
        tag="openai",
        body=EmbeddingRequest,
    ),
    Operation(method="get", path="/v1/models", summary="The functions", tag="openai", answer=ModelList),
    Operation(method="get", path="/v1/models/{model}", summary="One function", tag="openai", answer=Model),
    Operation(
        method="post",
        path="/functions/{function}/invoke",
        summary="Call any function (NAME or NAME:VERSION); the body is as its task says",
        tag="functions",
        answers=STREAM,
    ),
    Operation(
        method="post",
        path="/admin/functions",
        summary="Register a version",
        tag="admin",
        body=CreateFunction,
        answer=CreatedFunction,
        status=201,
    ),
    Operation(method="get", path="/admin/functions", summary="All functions", tag="admin"),
    Operation(method="get", path=_F, summary="One function", tag="admin"),
    Operation(method="patch", path=_F, summary="Change its scaling", tag="admin", body=PatchFunction),
    Operation(method="delete", path=_F, summary="Delete it", tag="admin"),
    Operation(method="post", path=f"{_F}/rollback", summary="Earlier version", tag="admin", body=Rollback),
    Operation(method="post", path=f"{_F}/scale", summary="Set its instances once", tag="admin", body=Scale),
    Operation(
        method="post",
        path=f"{_F}/warm",
        summary="Fill host tiers",
        tag="admin",
        body=Warm,
        answers=("application/x-ndjson",),
    ),
    Operation(method="post", path=f"{_F}/drop", summary="Drop its idle image", tag="admin", body=Drop),
    Operation(
        method="get",
        path=f"{_F}/logs",
        summary="Its log lines",
        tag="admin",
        answers=("text/plain",),
        query=(("lines", "integer"), ("follow", "boolean")),
    ),
    Operation(
        method="post",
        path="/admin/blobs/missing",
        summary="Which blobs the store lacks",
        tag="blobs",
        body=MissingBlobs,
        answer=MissingAnswer,
    ),
    Operation(method="get", path="/admin/blobs/{digest}", summary="How much is there", tag="blobs"),
    Operation(method="head", path="/admin/blobs/{digest}", summary="How much is there", tag="blobs"),
    Operation(
        method="patch",
        path="/admin/blobs/{digest}",
        summary="Add bytes to an upload",
        tag="blobs",
        headers=("Upload-Offset", "Upload-Length"),
    ),
    Operation(method="get", path="/admin/nodes", summary="The nodes", tag="admin"),
    Operation(method="get", path="/admin/instances", summary="The instances", tag="admin"),
    Operation(method="get", path="/admin/keys", summary="The API keys", tag="admin"),
    Operation(
        method="post", path="/admin/keys", summary="Make a key", tag="admin", body=CreateKey, status=201
    ),
    Operation(method="delete", path="/admin/keys/{key_id}", summary="Revoke a key", tag="admin"),
    Operation(method="get", path="/admin/prices", summary="The price table", tag="admin"),
    Operation(
        method="post",
        path="/admin/prices",
        summary="Add a price",
        tag="admin",
        body=CreateRate,
        answer=Rate,
        status=201,
    ),
    Operation(
        method="get",
        path="/admin/usage/report",
        summary="Sums by function and tenant",
        tag="usage",
        query=(("since", "number"), ("until", "number"), ("function", "string"), ("tenant", "string")),
    ),
    Operation(
        method="get",
        path="/admin/usage/show/{request_id}",
        summary="One request's record",
        tag="usage",
        answer=RequestRecord,
    ),
    _open("/livez", "Whether the process answers"),
    _open("/readyz", "Whether it takes requests"),
    _open("/health", "A summary"),
    _open("/metrics", "Prometheus metrics", media="text/plain"),
    _open("/openapi.json", "This document"),
)

# Shapes that no operation names as a whole, but that clients want to know.
_FURTHER = (
    ErrorEnvelope,
    ChatMessage,
    Usage,
    UsageRow,
    ClassifyRequest,
    ClassifyResponse,
    FeaturesRequest,
    FeaturesResponse,
)


@cache
def document() -> bytes:
    """The whole document, made at the first use."""
    kinds = [kind for op in OPERATIONS for kind in (op.body, op.answer) if kind is not None]
    kinds = list(dict.fromkeys([*kinds, *_FURTHER]))
    _, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    paths: dict[str, dict[str, object]] = {}
    for op in OPERATIONS:
        paths.setdefault(op.path, {})[op.method] = _operation(op)
    whole = {
        "openapi": "3.1.0",
        "info": {
            "title": "Hypercast",
            "version": "0.1.0",
            "description": "Serverless functions for machine-learning models.",
        },
        "security": [{"key": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
    return msgspec.json.encode(whole)


def _operation(op: Operation) -> dict[str, object]:
    good: dict[str, object] = {"description": "Done"}
    if op.method != "head":
        good["content"] = {media: {"schema": _schema(op.answer)} for media in op.answers}
    described: dict[str, object] = {
        "operationId": _operation_id(op),
        "summary": op.summary,
        "tags": [op.tag],
        "responses": {
            str(op.status): good,
            "default": {
                "description": "A failure",
                "content": {JSON: {"schema": _schema(ErrorEnvelope)}},
            },
        },
    }
    if parameters := list(_parameters(op)):
        described["parameters"] = parameters
    if op.body is not None:
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": _schema(op.body)}}}
    elif op.path.endswith("/invoke"):
        media: dict[str, dict[str, object]] = {JSON: {"schema": {}}, "image/*": {"schema": {}}}
        described["requestBody"] = {"required": True, "content": media}
    elif op.method == "patch":
        described["requestBody"] = {"required": True, "content": {"application/octet-stream": {}}}
    if op.open:
        described["security"] = []
    return described


def _parameters(op: Operation) -> Iterator[dict[str, object]]:
    for part in op.path.split("/"):
        if part.startswith("{"):
            yield {"name": part[1:-1], "in": "path", "required": True, "schema": {"type": "string"}}
    for name, kind in op.query:
        yield {"name": name, "in": "query", "schema": {"type": kind}}
    for name in op.headers:
        yield {"name": name, "in": "header", "required": True, "schema": {"type": "integer"}}


def _operation_id(op: Operation) -> str:
    words = [part.strip("{}").replace(".", "_") for part in op.path.split("/") if part]
    return "_".join([op.method, *words]).replace("-", "_")


def _schema(kind: type | None) -> dict[str, str]:
    return {} if kind is None else {"$ref": _REF.format(name=kind.__name__)}
