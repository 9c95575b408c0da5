"""The table of all operations: what /openapi.json says, and the tests hold against the routes."""

from dataclasses import dataclass
from enum import StrEnum

from gateway import parameters as p
from gateway import schemas_admin as admin
from gateway import schemas_answers as answers
from gateway.parameters import Parameter
from gateway.schemas_casts import CastList
from gateway.schemas_functions import ClassifyRequest, ClassifyResponse, FeaturesRequest, FeaturesResponse
from gateway.schemas_openai import ChatRequest, CompletionRequest, EmbeddingRequest, Model, ModelList
from registry.usage import Rate, RequestRecord

JSON = "application/json"
EVENTS = "text/event-stream"
LINES = "application/x-ndjson"
TEXT = "text/plain"
BYTES = "application/octet-stream"
CSV = "text/csv"
PARQUET = "application/vnd.apache.parquet"


class Needs(StrEnum):
    """Whose key an operation asks for."""

    NOTHING = "nothing"
    KEY = "key"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path.

    `body` is a JSON type, or the media types of a body that has none; `answer` is the type of the good
    JSON answer, `others` its other media types. `failures` are statuses beyond those that every such
    operation shares. `empty_body` says that no body means `{}`.
    """

    method: str
    path: str
    summary: str
    tag: str
    needs: Needs = Needs.ADMIN
    body: type | tuple[str, ...] | None = None
    empty_body: bool = False
    answer: object = None
    others: tuple[str, ...] = ()
    status: int = 200
    parameters: tuple[Parameter, ...] = ()
    failures: tuple[int, ...] = ()
    calls: bool = False


def _open(path: str, summary: str, answer: type | None = None, *others: str) -> Operation:
    return Operation(
        method="get",
        path=path,
        summary=summary,
        tag="system",
        needs=Needs.NOTHING,
        answer=answer,
        others=others,
    )


def _call(path: str, summary: str, body: type, answer: type, *others: str) -> Operation:
    return Operation(
        method="post",
        path=path,
        summary=summary,
        tag="openai",
        needs=Needs.KEY,
        body=body,
        answer=answer,
        others=others,
        calls=True,
    )


_F = "/admin/functions/{name}"
_NAMED = (p.FUNCTION_NAME,)
_WAITS = (400, 409, 503, 504)

# What the generic invoke takes and gives, by the function's task.
INVOKE_BODIES: tuple[object, ...] = (
    CompletionRequest,
    ChatRequest,
    EmbeddingRequest,
    ClassifyRequest,
    FeaturesRequest,
)
INVOKE_ANSWERS: tuple[object, ...] = (
    answers.Completion,
    answers.ChatCompletion,
    answers.EmbeddingList,
    ClassifyResponse,
    FeaturesResponse,
)

OPERATIONS: tuple[Operation, ...] = (
    _call("/v1/chat/completions", "Continue a conversation", ChatRequest, answers.ChatCompletion, EVENTS),
    _call("/v1/completions", "Continue a text or token ids", CompletionRequest, answers.Completion, EVENTS),
    _call("/v1/embeddings", "Vectors of texts or token ids", EmbeddingRequest, answers.EmbeddingList),
    Operation(
        method="get",
        path="/v1/models",
        summary="The functions",
        tag="openai",
        needs=Needs.KEY,
        answer=ModelList,
    ),
    Operation(
        method="get",
        path="/v1/models/{model}",
        summary="One function",
        tag="openai",
        needs=Needs.KEY,
        answer=Model,
        parameters=(p.MODEL,),
        failures=(404,),
    ),
    Operation(
        method="post",
        path="/functions/{function}/invoke",
        summary="Call any function; the body is as its task says",
        tag="functions",
        needs=Needs.KEY,
        body=(JSON, "image/*"),
        others=(JSON, EVENTS),
        parameters=(p.FUNCTION_SPEC, p.TOP_K),
        calls=True,
    ),
    Operation(
        method="post",
        path="/admin/functions",
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
        summary="All functions",
        tag="admin",
        answer=answers.FunctionList,
    ),
    Operation(
        method="get",
        path=_F,
        summary="One function",
        tag="admin",
        answer=answers.FunctionShown,
        parameters=_NAMED,
        failures=(404,),
    ),
    Operation(
        method="patch",
        path=_F,
        summary="Change its scaling",
        tag="admin",
        body=admin.PatchFunction,
        empty_body=True,
        answer=answers.FunctionShown,
        parameters=_NAMED,
        failures=(404, 409),
    ),
    Operation(
        method="delete",
        path=_F,
        summary="Delete it",
        tag="admin",
        answer=answers.Deleted,
        parameters=_NAMED,
        failures=(404, 409),
    ),
    Operation(
        method="post",
        path=f"{_F}/rollback",
        summary="Make an earlier version current",
        tag="admin",
        body=admin.Rollback,
        empty_body=True,
        answer=answers.FunctionShown,
        parameters=_NAMED,
        failures=(404, *_WAITS),
    ),
    Operation(
        method="post",
        path=f"{_F}/scale",
        summary="Set its instances once",
        tag="admin",
        body=admin.Scale,
        empty_body=True,
        answer=answers.Scaled,
        parameters=_NAMED,
        failures=(404, *_WAITS),
    ),
    Operation(
        method="post",
        path=f"{_F}/warm",
        summary="Fill host tiers",
        tag="admin",
        body=admin.Warm,
        empty_body=True,
        others=(LINES,),
        parameters=_NAMED,
        failures=(404, *_WAITS),
    ),
    Operation(
        method="post",
        path=f"{_F}/drop",
        summary="Drop its idle image",
        tag="admin",
        body=admin.Drop,
        empty_body=True,
        answer=answers.Dropped,
        parameters=_NAMED,
        failures=(404, *_WAITS),
    ),
    Operation(
        method="get",
        path=f"{_F}/logs",
        summary="Its log lines",
        tag="admin",
        others=(TEXT,),
        parameters=(*_NAMED, p.LINES, p.FOLLOW),
        failures=(404, 422),
    ),
    Operation(
        method="post",
        path="/admin/blobs/missing",
        summary="Which blobs the store lacks",
        tag="blobs",
        body=admin.MissingBlobs,
        answer=admin.MissingAnswer,
    ),
    *(
        Operation(
            method=method,
            path="/admin/blobs/{digest}",
            summary="How much is there",
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
        summary="Add bytes to an upload",
        tag="blobs",
        body=(BYTES,),
        answer=answers.BlobProgress,
        parameters=(p.DIGEST, p.UPLOAD_OFFSET, p.UPLOAD_LENGTH),
        failures=(409, 507),
    ),
    Operation(method="get", path="/admin/nodes", summary="The nodes", tag="admin", answer=answers.NodeList),
    Operation(
        method="get",
        path="/admin/instances",
        summary="The instances",
        tag="admin",
        answer=answers.InstanceList,
    ),
    Operation(
        method="get",
        path="/admin/casts",
        summary="Images on their way to nodes, and how each node gets on",
        tag="admin",
        answer=CastList,
        parameters=(p.OF_FUNCTION, p.OF_CAST, p.SUMMARY),
        failures=(422,),
    ),
    Operation(method="get", path="/admin/keys", summary="The API keys", tag="admin", answer=answers.KeyList),
    Operation(
        method="post",
        path="/admin/keys",
        summary="Make a key",
        tag="admin",
        body=admin.CreateKey,
        answer=answers.NewKey,
        status=201,
    ),
    Operation(
        method="patch",
        path="/admin/keys/{key_id}",
        summary="Set or lift a key's limits",
        tag="admin",
        body=admin.PatchKey,
        answer=answers.Key,
        parameters=(p.KEY_ID,),
        failures=(404, 409),
    ),
    Operation(
        method="delete",
        path="/admin/keys/{key_id}",
        summary="Revoke a key",
        tag="admin",
        answer=answers.Key,
        parameters=(p.KEY_ID,),
        failures=(404,),
    ),
    Operation(
        method="get", path="/admin/prices", summary="The price table", tag="admin", answer=answers.RateList
    ),
    Operation(
        method="post",
        path="/admin/prices",
        summary="Add a price",
        tag="admin",
        body=admin.CreateRate,
        answer=Rate,
        status=201,
        failures=(409,),
    ),
    Operation(
        method="get",
        path="/admin/usage/report",
        summary="Sums by function and tenant, or by other properties",
        tag="usage",
        needs=Needs.KEY,
        answer=answers.UsageReport,
        others=(CSV, PARQUET),
        parameters=(p.GROUP_BY, p.SINCE, p.UNTIL, p.OF_FUNCTION, p.OF_TENANT, p.OF_KEY, p.FORMAT),
        failures=(422,),
    ),
    Operation(
        method="get",
        path="/admin/usage/summary",
        summary="What a period held, by function and tenant",
        tag="usage",
        needs=Needs.KEY,
        answer=answers.UsageSummary,
        parameters=(p.SINCE, p.UNTIL, p.OF_FUNCTION, p.OF_TENANT),
        failures=(422,),
    ),
    Operation(
        method="get",
        path="/admin/usage/gpu-time",
        summary="Accelerator time: allocated, attributed, loading, idle, lost",
        tag="usage",
        needs=Needs.KEY,
        answer=answers.GpuTimeReport,
        others=(CSV, PARQUET),
        parameters=(p.GPU_BY, p.SINCE, p.UNTIL, p.OF_FUNCTION, p.OF_TENANT, p.RESOLUTION, p.FORMAT),
        failures=(422,),
    ),
    Operation(
        method="get",
        path="/admin/usage/check",
        summary="Whether the ledger adds up",
        tag="usage",
        answer=answers.UsageCheck,
        parameters=(p.SINCE, p.UNTIL),
        failures=(422,),
    ),
    Operation(
        method="get",
        path="/admin/usage/show/{request_id}",
        summary="One request's record",
        tag="usage",
        needs=Needs.KEY,
        answer=RequestRecord,
        parameters=(p.REQUEST_ID,),
        failures=(404,),
    ),
    _open("/livez", "Whether the process answers", answers.Alive),
    _open("/readyz", "Whether it takes requests", answers.Readiness),
    _open("/health", "A summary", answers.Health),
    _open("/metrics", "Prometheus metrics", None, TEXT),
    _open("/openapi.json", "This document", None, JSON),
)
