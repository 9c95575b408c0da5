"""The OpenAPI document, from the table of operations and the schemas of their bodies."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from gateway.core.error_forms import ErrorForm, error_form
from gateway.core.errors import PROTOCOL_PATHS
from gateway.core.rights import Right, roles_with
from gateway.schemas.answers import VERSION
from gateway.schemas.anthropic import AnthropicError
from gateway.schemas.open_inference import InferenceError
from gateway.schemas.openai import ChatMessage, ErrorEnvelope
from gateway.schemas.operations import EVENTS, FORM, JSON, Operation
from gateway.schemas.parameters import CLIENT_REQUEST_ID, Parameter

Json = dict[str, object]

_TEXT: Json = {"type": "string"}
_BINARY: Json = {"type": "string", "format": "binary"}
_UPLOAD: Json = {
    "type": "object",
    "properties": {"file": _BINARY, "purpose": {"enum": ["batch", "user_data"]}},
    "required": ["file", "purpose"],
}
_REF = "#/components/schemas/{name}"
_STATUS_TEXTS = {
    400: "Not JSON, or a request that cannot be executed; below /v1/ and /v2/ also what is a 422 elsewhere",
    401: "No API key, or one that is unknown, revoked or expired",
    403: "The key lacks the right",
    404: "No such function, version, key or request",
    408: "The body did not arrive in time",
    409: "A conflict with the present state",
    413: "The body is too large or too complex",
    422: "A field is missing, of the wrong type or out of bounds; `param` names it",
    429: "A rate, concurrency or spend limit of the key is reached",
    500: "The function failed, or the gateway",
    503: "Overloaded, draining, no node, a failed start, or Redis is unavailable; retry",
    504: "A deadline passed",
    507: "The store's disk is full",
}
_ERRORS: dict[ErrorForm, type] = {
    ErrorForm.OPENAI: ErrorEnvelope,
    ErrorForm.ANTHROPIC: AnthropicError,
    ErrorForm.INFERENCE: InferenceError,
}
_TAGS = (  # of paths, by the first prefix that fits
    ("/v1/messages", "anthropic"),
    ("/v1/", "openai"),
    ("/v2", "inference"),
    ("/tokenize", "openai"),
    ("/detokenize", "openai"),
    ("/functions/", "functions"),
    ("/predictions", "predictions"),
    ("/webhooks/", "predictions"),
    ("/admin/blobs/", "blobs"),
    ("/admin/usage/", "usage"),
    ("/admin/", "admin"),
    ("/", "system"),
)
_EVERYWHERE = (500,)
_WITH_KEY = (401, 403, 429, 503)
_WITH_BODY = (400, 408, 413, 422)
_OF_CALLS = (400, 404, 422, 504)

_RATE_PARTS: tuple[tuple[str, str, Json], ...] = (
    ("Limit", "Limit a minute", {"type": "integer", "minimum": 1}),
    ("Remaining", "Number left now", {"type": "integer", "minimum": 0}),
    ("Reset", "Time until the limit is unused again", {"type": "string"}),
)
_HEADERS: dict[str, tuple[str, Json]] = {
    "X-Request-Id": ("The request's id", {"type": "string"}),
    "Retry-After": ("Seconds to wait", {"type": "integer", "minimum": 0, "maximum": 120}),
    **{
        f"X-Ratelimit-{what}-{of}": (f"{note}, for a key with a limit of {of.lower()}", schema)
        for of in ("Requests", "Tokens")
        for what, note, schema in _RATE_PARTS
    },
    "WWW-Authenticate": ("Bearer", {"type": "string"}),
    "X-Function-Version": ("The version that served", {"type": "integer", "minimum": 1}),
    "X-Start-Kind": (
        "How the instance was started; `hot` if it was ready",
        {"enum": ["hot", "warm", "cold", "live"]},
    ),
    "Server-Timing": ("Durations of the request's phases in ms", {"type": "string"}),
    "Upload-Offset": ("Number of stored bytes of the blob", {"type": "integer", "minimum": 0}),
    "Upload-Complete": ("Whether the blob is complete", {"enum": ["?0", "?1"]}),
}


def document(operations: Sequence[Operation[Any]]) -> bytes:
    """Return the encoded document of the operations."""
    kinds = list(dict.fromkeys(_kinds(operations)))
    _, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    # Messages reach templates as they are, so their type is Object; they must have this shape.
    components["ChatRequest"]["properties"]["messages"]["items"] = _schema(ChatMessage)
    paths: dict[str, Json] = {}
    for op in operations:
        paths.setdefault(op.path, {})[op.method] = _operation(op)
    whole = {
        "openapi": "3.1.0",
        "info": {
            "title": "Hypercast",
            "version": VERSION,
            "description": "Serverless functions for machine-learning models.",
        },
        "security": [{"key": []}, {"x-api-key": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "headers": {
                name: {"description": note, "schema": schema} for name, (note, schema) in _HEADERS.items()
            },
            "parameters": {CLIENT_REQUEST_ID.name: _parameter(CLIENT_REQUEST_ID)},
            "responses": {
                _failure_name(status, form): _failure(status, form)
                for form in ErrorForm
                for status in _STATUS_TEXTS
            },
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }
    return msgspec.json.encode(whole)


def statuses(op: Operation[Any]) -> frozenset[int]:
    """Return every error status of the operation."""
    found = {*_EVERYWHERE, *op.failures}
    if op.needs is not Right.NONE:
        found.update(_WITH_KEY)
    if op.body is not None:
        found.update(_WITH_BODY)
    if op.calls:
        found.update(_OF_CALLS)
    if op.path.startswith(PROTOCOL_PATHS):
        found.discard(422)  # an invalid value is a 400 there
    return frozenset(found)


def _kinds(operations: Sequence[Operation[Any]]) -> Iterator[object]:
    for op in operations:
        if isinstance(op.body, type):
            yield op.body
        if op.answer is not None:
            yield op.answer
        yield from (*op.any_body, *op.any_answer)
    yield from (*_ERRORS.values(), ChatMessage)


def _operation(op: Operation[Any]) -> Json:
    described: Json = {
        "operationId": _operation_id(op),
        "summary": op.summary,
        "tags": [next(tag for prefix, tag in _TAGS if op.path.startswith(prefix))],
        "parameters": [
            *(_parameter(parameter) for parameter in op.parameters),
            {"$ref": f"#/components/parameters/{CLIENT_REQUEST_ID.name}"},
        ],
        "responses": {
            **{str(status): _good(op) for status in (op.status, *op.also)},
            **{str(status): {"$ref": _failure_ref(status, op.path)} for status in sorted(statuses(op))},
        },
    }
    if op.path in ("/readyz", "/health", "/v2/health/ready"):
        described["responses"]["503"] = {**_good(op), "description": "Not ready"}  # type: ignore[index]
    if op.method == "head":
        described["responses"] = _without_content(described["responses"])
    if op.body is not None:
        described["requestBody"] = {"required": not op.empty_body, "content": _body(op)}
    if op.needs is Right.NONE:
        described["security"] = []
    else:
        described["description"] = f"For keys of the roles: {', '.join(roles_with(op.needs))}"
    return described


def _good(op: Operation[Any]) -> Json:
    headers = ["X-Request-Id"]
    if op.calls:
        headers += ["X-Function-Version", "X-Start-Kind", "Server-Timing"]
    if "{digest}" in op.path:
        headers += ["Upload-Offset", "Upload-Complete"]
    # OpenAPI 3.1 has no schema for the events of a stream.
    content: Json = {media: {} if media in (JSON, EVENTS) else {"schema": _TEXT} for media in op.others}
    if op.answer is not None:
        content[JSON] = {"schema": _schema(op.answer)}
    elif op.any_answer:
        content[JSON] = {"schema": {"anyOf": [*map(_schema, op.any_answer), {}]}}
    return {"description": "Done", "headers": _headers(headers), "content": content}


def _failure_name(status: int, form: ErrorForm) -> str:
    return str(status) if form is ErrorForm.OPENAI else f"{form.value}-{status}"


def _failure_ref(status: int, path: str) -> str:
    return f"#/components/responses/{_failure_name(status, error_form(path))}"


def _failure(status: int, form: ErrorForm) -> Json:
    headers = ["X-Request-Id"]
    if status in (429, 503):
        headers.append("Retry-After")
    if status == 429:
        headers += [name for name in _HEADERS if name.startswith("X-Ratelimit-")]
    if status == 401:
        headers.append("WWW-Authenticate")
    return {
        "description": _STATUS_TEXTS[status],
        "headers": _headers(headers),
        "content": {JSON: {"schema": _schema(_ERRORS[form])}},
    }


def _without_content(responses: object) -> Json:
    """Return the responses of a HEAD, which have no body."""
    assert isinstance(responses, dict)
    return {
        status: {"description": _STATUS_TEXTS.get(int(status), "Done"), "headers": _headers(["X-Request-Id"])}
        for status in responses
    }


def _headers(names: list[str]) -> Json:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def _body(op: Operation[Any]) -> Json:
    if isinstance(op.body, type):
        return {JSON: {"schema": _schema(op.body)}}
    content: Json = {media: {"schema": _UPLOAD if media == FORM else _BINARY} for media in op.body or ()}
    if op.any_body:
        content[JSON] = {"schema": {"anyOf": [*map(_schema, op.any_body), {}]}}
    return content


def _parameter(parameter: Parameter) -> Json:
    described: Json = {
        "name": parameter.name,
        "in": parameter.place,
        "required": parameter.required,
        "schema": parameter.schema,
    }
    return described | {"description": parameter.note} if parameter.note else described


def _operation_id(op: Operation[Any]) -> str:
    words = [part.strip("{}").replace(".", "_") for part in op.path.split("/") if part] or ["index"]
    return "_".join([op.method, *words]).replace("-", "_")


def _schema(kind: object) -> Json:
    return {"$ref": _REF.format(name=getattr(kind, "__name__", ""))}
