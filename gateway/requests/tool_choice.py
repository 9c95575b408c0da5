"""The tools of a chat request, and the call that its `tool_choice` forces. Pure."""

from collections.abc import Mapping
from typing import Any

from gateway.core.errors import BadRequest
from gateway.schemas.openai import ChatRequest

_PARAM = "tool_choice"
_NAMED = '{"type": "function", "function": {"name": NAME}}'
_ANY_ARGUMENTS = {"type": "object"}


def tools_of(request: ChatRequest) -> dict[str, Mapping[str, Any]]:
    """Return the functions that the text may call, by name."""
    if request.tool_choice == "none":
        return {}
    functions = [tool.get("function") for tool in request.tools or ()]
    return {
        one["name"]: one for one in functions if isinstance(one, dict) and isinstance(one.get("name"), str)
    }


def is_forced(request: ChatRequest) -> bool:
    """Return whether the text must be a call."""
    return request.tool_choice not in (None, "none", "auto")


def forced_schema(request: ChatRequest) -> dict[str, Any]:
    """Return the JSON schema of the one call that a forced request's text is. Raises BadRequest."""
    tools = tools_of(request)
    match request.tool_choice:
        case "required":
            names = list(tools)
        case {"type": "function", "function": {"name": str(name)}}:
            names = [name] if name in tools else []
        case _:
            raise BadRequest(f"{_PARAM} must be none, auto, required or {_NAMED}", param=_PARAM)
    if not names:
        raise BadRequest(
            f"{_PARAM} names no function of tools; they have: {', '.join(tools) or 'none'}", param=_PARAM
        )
    parameters = [tools[name].get("parameters") or _ANY_ARGUMENTS for name in names]
    calls = [_call_schema(name, f"#/$defs/{number}") for number, name in enumerate(names)]
    # A tool's references start at its own schema, which lies deeper here.
    defs = {str(number): _moved(schema, f"#/$defs/{number}") for number, schema in enumerate(parameters)}
    return {"anyOf": calls, "$defs": defs}


def _call_schema(name: str, arguments: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": {"$ref": arguments}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: object, root: str) -> object:
    """Return a schema whose references to itself start at `root`."""
    if isinstance(schema, list):
        return [_moved(one, root) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: root + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, root)
        for key, value in schema.items()
    }
