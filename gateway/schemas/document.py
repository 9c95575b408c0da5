"""The OpenAPI description of all endpoints, from the table of operations and the schemas of their bodies."""

from collections.abc import Iterator
from functools import cache

import msgspec

from gateway.operations import EVENTS, INVOKE_ANSWERS, INVOKE_BODIES, JSON, OPERATIONS, Needs, Operation
from gateway.parameters import CLIENT_REQUEST_ID, Parameter
from gateway.schemas_openai import ChatMessage, ErrorEnvelope

Json = dict[str, object]

_TEXT: Json = {"type": "string"}
_REF = "#/components/schemas/{name}"
_WHY = {
    400: "Well-formed, but it cannot be carried out as asked; or no JSON",
    401: "No key, or one that is unknown, revoked or expired",
    403: "The key does not reach this",
    404: "No such function, version, key or request",
    408: "The body did not come in time",
    409: "Something else stands there already",
    413: "The body is too large, or holds too many parts",
    422: "A field is missing, of the wrong type or out of its bounds; `param` names it",
    429: "The key has used up what it may have at once or in a time",
    500: "The function failed, or the gateway",
    503: "Not now: overloaded, draining, no node, no start, or the state does not answer",
    504: "A deadline passed",
    507: "The store's disk is full",
}
_EVERYWHERE = (500,)
_WITH_KEY = (401, 403, 429, 503)
_WITH_BODY = (400, 408, 413, 422)
_OF_CALLS = (400, 404, 422, 504)

_RATE_PARTS: tuple[tuple[str, str, Json], ...] = (
    ("Limit", "What a minute may bring,", {"type": "integer", "minimum": 1}),
    ("Remaining", "What is left now,", {"type": "integer", "minimum": 0}),
    ("Reset", "When all of it is there again,", {"type": "string"}),
)
_HEADERS: dict[str, tuple[str, Json]] = {
    "X-Request-Id": ("The id in logs, bills and errors", {"type": "string"}),
    "Retry-After": ("Seconds to wait", {"type": "integer", "minimum": 0, "maximum": 120}),
    **{
        f"X-Ratelimit-{what}-{of}": (f"{note} of a key with a limit of {of.lower()}", schema)
        for of in ("Requests", "Tokens")
        for what, note, schema in _RATE_PARTS
    },
    "WWW-Authenticate": ("Bearer", {"type": "string"}),
    "X-Function-Version": ("The version that served", {"type": "integer", "minimum": 1}),
    "X-Start-Kind": (
        "How its instance was started, `hot` if it was there",
        {"enum": ["hot", "warm", "cold", "live"]},
    ),
    "Server-Timing": ("Where the time went, in ms", {"type": "string"}),
    "Upload-Offset": ("How many bytes of the blob are there", {"type": "integer", "minimum": 0}),
    "Upload-Complete": ("Whether that is all", {"enum": ["?0", "?1"]}),
}


@cache
def document() -> bytes:
    """The whole document, made at the first use."""
    kinds = list(dict.fromkeys(_kinds()))
    _, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    # Messages are passed on to templates as they came, yet must be of this shape.
    components["ChatRequest"]["properties"]["messages"]["items"] = _schema(ChatMessage)
    paths: dict[str, Json] = {}
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
            "headers": {
                name: {"description": note, "schema": schema} for name, (note, schema) in _HEADERS.items()
            },
            "parameters": {CLIENT_REQUEST_ID.name: _parameter(CLIENT_REQUEST_ID)},
            "responses": {str(status): _failure(status) for status in _WHY},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
    return msgspec.json.encode(whole)


def statuses(op: Operation) -> frozenset[int]:
    """Every status of a failure that the operation may answer with."""
    found = {*_EVERYWHERE, *op.failures}
    if op.needs is not Needs.NOTHING:
        found.update(_WITH_KEY)
    if op.body is not None:
        found.update(_WITH_BODY)
    if op.calls:
        found.update(_OF_CALLS)
    return frozenset(found)


def _kinds() -> Iterator[object]:
    for op in OPERATIONS:
        if isinstance(op.body, type):
            yield op.body
        if op.answer is not None:
            yield op.answer
    yield from (*INVOKE_BODIES, *INVOKE_ANSWERS, ErrorEnvelope, ChatMessage)


def _operation(op: Operation) -> Json:
    described: Json = {
        "operationId": _operation_id(op),
        "summary": op.summary,
        "tags": [op.tag],
        "parameters": [
            *(_parameter(parameter) for parameter in op.parameters),
            {"$ref": f"#/components/parameters/{CLIENT_REQUEST_ID.name}"},
        ],
        "responses": {
            str(op.status): _good(op),
            **{str(status): {"$ref": f"#/components/responses/{status}"} for status in sorted(statuses(op))},
        },
    }
    if op.path in ("/readyz", "/health"):
        described["responses"]["503"] = {**_good(op), "description": "Not ready"}  # type: ignore[index]
    if op.method == "head":
        described["responses"] = _without_content(described["responses"])
    if op.body is not None:
        described["requestBody"] = {"required": not op.empty_body, "content": _body(op)}
    if op.needs is Needs.NOTHING:
        described["security"] = []
    return described


def _good(op: Operation) -> Json:
    headers = ["X-Request-Id"]
    if op.calls:
        headers += ["X-Function-Version", "X-Start-Kind", "Server-Timing"]
    if "{digest}" in op.path:
        headers += ["Upload-Offset", "Upload-Complete"]
    # OpenAPI 3.1 has no schema for the events of a stream.
    content: Json = {media: {} if media in (JSON, EVENTS) else {"schema": _TEXT} for media in op.others}
    if op.answer is not None:
        content[JSON] = {"schema": _schema(op.answer)}
    elif op.path.endswith("/invoke"):
        content[JSON] = {"schema": {"anyOf": [*map(_schema, INVOKE_ANSWERS), {}]}}
    return {"description": "Done", "headers": _headers(headers), "content": content}


def _failure(status: int) -> Json:
    headers = ["X-Request-Id"]
    if status in (429, 503):
        headers.append("Retry-After")
    if status == 429:
        headers += [name for name in _HEADERS if name.startswith("X-Ratelimit-")]
    if status == 401:
        headers.append("WWW-Authenticate")
    return {
        "description": _WHY[status],
        "headers": _headers(headers),
        "content": {JSON: {"schema": _schema(ErrorEnvelope)}},
    }


def _without_content(responses: object) -> Json:
    """The responses of a HEAD, which have no body."""
    assert isinstance(responses, dict)
    return {
        status: {"description": _WHY.get(int(status), "Done"), "headers": _headers(["X-Request-Id"])}
        for status in responses
    }


def _headers(names: list[str]) -> Json:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def _body(op: Operation) -> Json:
    if isinstance(op.body, type):
        return {JSON: {"schema": _schema(op.body)}}
    content: Json = {media: {"schema": {"type": "string", "format": "binary"}} for media in op.body or ()}
    if op.path.endswith("/invoke"):
        content[JSON] = {"schema": {"anyOf": [*map(_schema, INVOKE_BODIES), {}]}}
    return content


def _parameter(parameter: Parameter) -> Json:
    described: Json = {
        "name": parameter.name,
        "in": parameter.place,
        "required": parameter.required,
        "schema": parameter.schema,
    }
    return described | {"description": parameter.note} if parameter.note else described


def _operation_id(op: Operation) -> str:
    words = [part.strip("{}").replace(".", "_") for part in op.path.split("/") if part]
    return "_".join([op.method, *words]).replace("-", "_")


def _schema(kind: object) -> Json:
    return {"$ref": _REF.format(name=getattr(kind, "__name__", ""))}
