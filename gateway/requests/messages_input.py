"""Anthropic's messages as the body of a chat. Pure."""

import json
from collections.abc import Sequence
from typing import Any

from gateway.core.errors import BadRequest
from gateway.requests.reply_format import Json
from gateway.schemas.anthropic import CountTokensRequest, MessagesRequest
from gateway.schemas.openai import Object

_KEPT = ("temperature", "top_k", "top_p", "stream", "seed", "ignore_eos")
_ROLES = ("user", "assistant", "system")
_THOUGHTS = ("thinking", "redacted_thinking")  # of earlier turns: they are no part of a prompt


def chat_of_messages(request: MessagesRequest) -> Json:
    """Return the body of the same request as a chat. Raises BadRequest for what a chat cannot express."""
    for field in ("container", "mcp_servers"):
        if getattr(request, field):
            raise _unsupported(field, f"{field} is not supported")
    if request.messages[-1].get("role") == "assistant":
        raise _unsupported("messages", "the last message must not be the assistant's: no text is continued")
    body: Json = {name: value for name in _KEPT if (value := getattr(request, name)) is not None}
    body |= prompt_of_messages(request) | {"max_tokens": request.max_tokens}
    if request.stop_sequences:
        body["stop"] = request.stop_sequences
    if request.output_config:
        body |= _output(request.output_config)
    if isinstance(user := (request.metadata or {}).get("user_id"), str):
        body["user"] = user[:1024]
    return body


def prompt_of_messages(request: CountTokensRequest) -> Json:
    """Return what of a chat's body is in its prompt. Raises BadRequest."""
    if (request.thinking or {}).get("type", "disabled") != "disabled":
        raise _unsupported("thinking", "thinking is not supported: leave it out or disable it")
    messages: list[Json] = []
    if request.system:
        messages.append({"role": "system", "content": _system(request.system)})
    for index, message in enumerate(request.messages):
        messages += _turn(message, f"messages[{index}]")
    body: Json = {"model": request.model, "messages": messages}
    if request.tools:
        body["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools)]
        if request.tool_choice is not None:
            body["tool_choice"] = _tool_choice(request.tool_choice)
    return body


def _system(given: str | Sequence[Object]) -> str:
    return given if isinstance(given, str) else _joined(given, "system")


def _turn(message: Object, param: str) -> list[Json]:
    """Return a turn as messages: the results of tools, which are in a user's turn, come before its text."""
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise BadRequest(f"{param}.role must be one of {', '.join(_ROLES)}", param=f"{param}.role")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not content:
        raise BadRequest(f"{param}.content must be a text or a list of blocks", param=f"{param}.content")
    parts: list[Json] = []
    calls: list[Json] = []
    results: list[Json] = []
    for number, block in enumerate(content):
        where = f"{param}.content[{number}]"
        match block:
            case {"type": "text", "text": str(text)}:
                parts.append({"type": "text", "text": text})
            case {"type": "image", "source": dict(source)} if role == "user":
                parts.append({"type": "image_url", "image_url": {"url": _image(source, where)}})
            case {"type": "tool_use", "id": str(id_), "name": str(name)} if role == "assistant":
                function = {"name": name, "arguments": json.dumps(block.get("input") or {})}
                calls.append({"id": id_, "type": "function", "function": function})
            case {"type": "tool_result", "tool_use_id": str(id_)} if role == "user":
                text = _result(block.get("content"), where)
                results.append({"role": "tool", "tool_call_id": id_, "content": text})
            case {"type": str(kind)} if kind in _THOUGHTS and role == "assistant":
                pass
            case _:
                raise BadRequest(
                    f"{where} is no block that a message of the role {role} may have here: "
                    "text, image and tool_result of a user, text and tool_use of an assistant",
                    param=where,
                    code="unsupported_parameter",
                )
    if not parts and not calls:
        return results
    plain = all(part["type"] == "text" for part in parts)
    spoken: Json = {"role": role}
    # Texts alone as one: so do templates take them.
    spoken["content"] = "\n".join(str(part["text"]) for part in parts) if plain else parts
    if calls:
        spoken |= {"content": spoken["content"] or None, "tool_calls": calls}
    return [*results, spoken]


def _image(source: Object, where: str) -> str:
    match source:
        case {"type": "base64", "media_type": str(kind), "data": str(data)}:
            return f"data:{kind};base64,{data}"
        case {"type": "url", "url": str(url)}:
            return url
        case _:
            raise BadRequest(f"{where}.source must be of the type base64", param=where)


def _result(content: object, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        return _joined(content, where)
    raise BadRequest(f"{where}.content must be a text or a list of texts", param=where)


def _joined(blocks: Sequence[Any], where: str) -> str:
    texts = []
    for block in blocks:
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case _:
                raise BadRequest(f"{where} must have blocks of the type text only", param=where)
    return "\n".join(texts)


def _tool(tool: Object, param: str) -> Json:
    if tool.get("type", "custom") != "custom" or not isinstance(tool.get("name"), str):
        raise _unsupported(param, f"{param} must have a name and an input_schema: no server has other tools")
    function: Json = {"name": tool["name"], "parameters": tool.get("input_schema") or {"type": "object"}}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _output(config: Object) -> Json:
    """Return the form of the text. Raises BadRequest for other settings of the output."""
    for name, value in config.items():
        if value is not None and name != "format":
            raise _unsupported(f"output_config.{name}", f"output_config.{name} is not supported")
    match config.get("format"):
        case None:
            return {}
        case {"type": "json_schema", "schema": dict(schema)}:
            return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
        case _:
            raise BadRequest(
                "output_config.format must be of the type json_schema, with a schema", param="output_config"
            )


def _tool_choice(given: Object) -> object:
    match given:
        case {"type": "auto"}:
            return "auto"
        case {"type": "none"}:
            return "none"
        case {"type": "any"}:
            return "required"
        case {"type": "tool", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case _:
            raise BadRequest("tool_choice.type must be auto, any, tool or none", param="tool_choice")


def _unsupported(param: str, message: str) -> BadRequest:
    return BadRequest(message, param=param, code="unsupported_parameter")
