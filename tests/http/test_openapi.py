"""The table of operations against its handlers and the code that reads parameters, and /openapi.json."""

import ast
import re
from pathlib import Path
from typing import cast, get_args, get_type_hints

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp

from gateway.api.app import make_handlers
from gateway.api.blob_collector import BlobCollector
from gateway.api.operations import OPERATIONS
from gateway.core.rights import Right
from gateway.requests.generation_reply import StreamReply
from gateway.requests.services import Services
from gateway.schemas import parameters
from gateway.schemas.document import document, statuses
from gateway.schemas.parameters import Parameter

GATEWAY = Path(parameters.__file__).parents[1]
DECLARED = {name: value for name, value in vars(parameters).items() if isinstance(value, Parameter)}


def test_only_declared_parameters_are_read() -> None:
    """No handler looks into query or headers by itself; what it reads is of the table."""
    for path in sorted(GATEWAY.rglob("*.py")):
        if path.name == "parameters.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr == "query_params":
                raise AssertionError(f"{path.name}:{node.lineno} reads the query by itself")


def test_every_declared_parameter_is_described_where_it_is_read() -> None:
    described = {parameter.name for op in OPERATIONS for parameter in op.parameters}
    read = {
        node.value.id
        for path in GATEWAY.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "read" and isinstance(node.value, ast.Name)
    }
    for name in read & set(DECLARED):
        assert DECLARED[name].name in described
    for op in OPERATIONS:
        for parameter in op.parameters:
            if parameter.place != "path":
                names = {name for name, value in DECLARED.items() if value is parameter}
                assert names & read, f"{op.method} {op.path} describes {parameter.name}, which nobody reads"


def test_handlers_return_what_the_table_declares() -> None:
    handlers = make_handlers(cast(Services, None), cast(BlobCollector, None))
    for op in OPERATIONS:
        returned = get_type_hints(op.handler(handlers))["return"]
        if returned == ASGIApp:  # calls of functions, and streams
            continue
        kinds = {kind for kind in (returned, *get_args(returned)) if isinstance(kind, type)}
        made = {
            msgspec.Struct,
            Response,
            StreamReply,
        }  # of a struct without a static type, or encoded already
        assert op.answer in kinds or kinds & made, f"{op.method} {op.path} returns {returned}"


def test_no_path_is_declared_twice() -> None:
    declared = [(op.method, op.path) for op in OPERATIONS]
    assert len(declared) == len(set(declared))


def test_path_parameters_are_those_of_the_path() -> None:
    for op in OPERATIONS:
        in_path = re.findall(r"{(\w+)}", op.path)
        assert in_path == [parameter.name for parameter in op.parameters if parameter.place == "path"]


def test_every_operation_tells_its_failures_in_the_envelope() -> None:
    whole = msgspec.json.decode(document(OPERATIONS))
    shared = whole["components"]["responses"]
    for op in OPERATIONS:
        responses = whole["paths"][op.path][op.method]["responses"]
        assert {int(status) for status in responses} == statuses(op) | {op.status, *op.also} | (
            {503} if op.path in ("/readyz", "/health", "/v2/health/ready") else set()
        )
        if op.needs is not Right.NONE:
            assert {"401", "403", "429", "503"} <= set(responses)
    forms = {"anthropic": "AnthropicError", "inference": "InferenceError"}
    for name, response in shared.items():
        form = forms.get(name.partition("-")[0], "ErrorEnvelope")
        schema = {"$ref": f"#/components/schemas/{form}"}
        assert response["content"]["application/json"]["schema"] == schema
    assert "Retry-After" in shared["429"]["headers"] and "Retry-After" in shared["503"]["headers"]


def test_text_and_lists_of_bodies_are_bounded() -> None:
    """Every string and every array that a client may send says how long it may be."""
    whole = msgspec.json.decode(document(OPERATIONS))
    schemas = whole["components"]["schemas"]

    def walk(where: str, schema: object, seen: frozenset[str]) -> None:
        if isinstance(schema, list):
            for item in schema:
                walk(where, item, seen)
        if not isinstance(schema, dict):
            return
        if (ref := schema.get("$ref")) and ref not in seen:
            walk(ref, schemas[ref.rpartition("/")[2]], seen | {ref})
        if schema.get("type") == "string" and not {"enum", "const", "pattern"} & set(schema):
            assert "maxLength" in schema, f"{where}: a text without a bound"
        if schema.get("type") == "array":
            assert "maxItems" in schema or "prefixItems" in schema, f"{where}: a list without a bound"
        for key in ("anyOf", "oneOf", "allOf", "items", "additionalProperties"):
            walk(where, schema.get(key), seen)
        for name, inner in schema.get("properties", {}).items():
            walk(f"{where}.{name}", inner, seen)

    for op in OPERATIONS:
        if isinstance(op.body, type):
            walk(op.body.__name__, schemas[op.body.__name__], frozenset())
