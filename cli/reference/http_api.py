"""The pages of all operations and their types, from the OpenAPI document that gateways serve."""

import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from cli.reference.markdown import anchor, code, prose, table
from gateway.api.operations import OPERATIONS
from gateway.schemas.document import document

_TYPES = "HTTP-TYPES.md"
_TITLES = {
    "openai": "OpenAI's API, and what goes with it",
    "anthropic": "Anthropic's API",
    "inference": "Open Inference Protocol",
    "functions": "Calls of functions",
    "predictions": "Predictions",
    "admin": "Administration",
    "blobs": "Blobs",
    "usage": "Usage",
    "system": "System",
}
_BOUNDS = (
    ("minimum", "≥ {}"),
    ("exclusiveMinimum", "> {}"),
    ("maximum", "≤ {}"),
    ("exclusiveMaximum", "< {}"),
    ("minLength", "length ≥ {}"),
    ("maxLength", "length ≤ {}"),
    ("minItems", "at least {} items"),
    ("maxItems", "at most {} items"),
    ("maxProperties", "at most {} fields"),
    ("pattern", "like {}"),
)
_HEAD = """\
# HTTP operations

Every operation of a gateway: who may use it, its parameters, bodies, answers and errors, from the
document that `/openapi.json` serves. [HTTP](../docs/HTTP.md) explains them, with examples; types of
bodies are on [a page of their own](HTTP-TYPES.md).

Each request may have the header `x-request-id`, and each response has one.

"""
_TYPES_HEAD = """\
# HTTP types

The JSON of bodies and answers of the [operations](HTTP-OPERATIONS.md). Fields without a default are
required.

"""

Json = Mapping[str, Any]


@functools.cache
def openapi() -> Json:
    """Return the OpenAPI document."""
    found: Json = json.loads(document(OPERATIONS))
    return found


def operations_page() -> str:
    """Return the page of all operations."""
    groups: dict[str, list[str]] = {tag: [] for tag in _TITLES}
    for path, method, operation in every_operation():
        groups[operation["tags"][0]].append(_operation(path, method, operation))
    sections = (f"## {_TITLES[tag]}\n\n" + "".join(parts) for tag, parts in groups.items())
    return _HEAD + "".join(sections) + _errors()


def types_page() -> str:
    """Return the page of all types."""
    schemas = openapi()["components"]["schemas"]
    return _TYPES_HEAD + "".join(_type(name, schemas[name]) for name in sorted(schemas))


def every_operation() -> Iterator[tuple[str, str, Json]]:
    """Yield path, method in capitals, and description of each operation."""
    for path, methods in openapi()["paths"].items():
        for method, operation in methods.items():
            yield path, method.upper(), operation


def _operation(path: str, method: str, operation: Json) -> str:
    parts = [f"### {method} {path}\n\n", f"{prose(operation['summary'])}.\n\n"]
    parts.append(
        "Open to all, without a key.\n\n" if "security" in operation else f"{operation['description']}.\n\n"
    )
    named = [one for one in operation["parameters"] if "$ref" not in one]
    parts.append(table(("parameter", "in", "type", "meaning"), map(_parameter, named)))
    if body := operation.get("requestBody"):
        parts.append(f"Body{'' if body['required'] else ' (may be empty)'}: {_content(body['content'])}.\n\n")
    answers = {status: one for status, one in operation["responses"].items() if "$ref" not in one}
    errors = [f"[{status}](#errors)" for status in operation["responses"] if status not in answers]
    parts += [f"Answer {code(status)}: {_answer(one)}.\n\n" for status, one in answers.items()]
    parts.append(f"Errors: {', '.join(errors)}.\n\n" if errors else "")
    return "".join(parts)


def _parameter(parameter: Json) -> tuple[str, str, str, str]:
    name = code(parameter["name"]) + ("" if parameter["required"] else " (optional)")
    return name, parameter["in"], _kind(parameter["schema"]), prose(parameter.get("description", ""))


def _errors() -> str:
    responses = openapi()["components"]["responses"]
    rows = (
        (code(status), prose(one["description"])) for status, one in responses.items() if status.isdigit()
    )
    forms = dict.fromkeys(_content(one["content"]) for one in responses.values())
    return f"## Errors\n\nThe body is, by the API: {'; '.join(forms)}.\n\n" + table(
        ("status", "meaning"), rows
    )


def _answer(response: Json) -> str:
    content, said = response.get("content"), response["description"]
    shown = _content(content) if content else "no body"
    return shown if said == "Done" else f"{prose(said)}, {shown}"


def _content(content: Json) -> str:
    return ", or ".join(
        f"{code(media)}" + (f" {_kind(said['schema'])}" if _has_fields(said) else "")
        for media, said in content.items()
    )


def _has_fields(said: Json) -> bool:
    schema = said.get("schema", {})
    return bool({"$ref", "anyOf", "properties"} & set(schema))


def _type(name: str, schema: Json) -> str:
    parts = [f"## {name}\n\n"]
    if "description" in schema:
        parts.append(f"{prose(' '.join(schema['description'].split()))}\n\n")
    if fields := schema.get("properties"):
        required = set(schema.get("required", ()))
        rows = (_field(field, of, required) for field, of in fields.items())
        parts.append(table(("field", "type", "default"), rows))
    else:
        parts.append(f"{_kind(schema)}\n\n")
    return "".join(parts)


def _field(name: str, schema: Json, required: set[str]) -> tuple[str, str, str]:
    default = "" if name in required else code(json.dumps(schema.get("default")))
    return code(name), _kind(schema), default


def _kind(schema: Json) -> str:
    """Return a schema in words."""
    if reference := schema.get("$ref"):
        name = reference.rpartition("/")[2]
        return f"[{name}]({_TYPES}#{anchor(name)})"
    if choices := schema.get("anyOf"):
        return " or ".join(dict.fromkeys(_kind(choice) for choice in choices if choice)) or "any JSON"
    if "enum" in schema:
        return ", ".join(code(str(value)) for value in schema["enum"])
    if "const" in schema:
        return code(json.dumps(schema["const"]))
    bounds = ", ".join(_bounds(schema))
    return f"{_plain(schema)} ({bounds})" if bounds else _plain(schema)


def _plain(schema: Json) -> str:
    kind = schema.get("type")
    if kind == "array":
        items = schema.get("items")
        return f"list of {_kind(items)}" if items else "list"
    if kind == "object":
        if fields := schema.get("properties"):
            return "object with " + ", ".join(f"{code(name)}: {_kind(of)}" for name, of in fields.items())
        values = schema.get("additionalProperties")
        return f"object of {_kind(values)}" if isinstance(values, Mapping) and values else "object"
    if schema.get("format") == "binary":
        return "bytes"
    words = {"string": "text", "number": "number", "integer": "whole number", "boolean": "true or false"}
    return words.get(str(kind), "null" if kind == "null" else "any JSON")


def _bounds(schema: Json) -> Iterator[str]:
    for key, words in _BOUNDS:
        if key in schema:
            value = schema[key]
            yield words.format(code(value) if key == "pattern" else value)
