"""Requests of OpenAI's Responses API as the body of a chat. Pure."""

from collections.abc import Sequence
from typing import Any

from gateway.core.errors import BadRequest
from gateway.requests.reply_format import Json
from gateway.schemas.openai import Object
from gateway.schemas.responses import ResponsesRequest

_KEPT = ("temperature", "top_p", "stream", "seed", "ignore_eos", "user")
_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text")
# What would change the response but is not implemented: refused unless it is null or as here.
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("previous_response_id", "conversation", "prompt", "max_tool_calls"), ()),
    "background": (False,),
    "include": ([],),
    "reasoning": ({},),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}


def chat_of_response(request: ResponsesRequest) -> Json:
    """Return the body of the same request as a chat. Raises BadRequest for what a chat cannot express."""
    for field, no_effect in _UNSUPPORTED.items():
        value = getattr(request, field)
        if value is not None and value not in no_effect:
            raise BadRequest(
                f"{field} is not supported: responses are not stored, and come of one generation",
                param=field,
                code="unsupported_parameter",
            )
    body: Json = {name: value for name in _KEPT if (value := getattr(request, name)) is not None}
    body |= {"model": request.model, "messages": _messages(request)}
    if request.max_output_tokens is not None:
        body["max_tokens"] = request.max_output_tokens
    if request.tools:
        body["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools)]
        if request.tool_choice is not None:
            body["tool_choice"] = _tool_choice(request.tool_choice)
    if (form := (request.text or {}).get("format")) is not None:
        body["response_format"] = _text_format(form)
    return body


def _messages(request: ResponsesRequest) -> list[Json]:
    messages: list[Json] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    for index, item in enumerate(request.input):
        param = f"input[{index}]"
        match item:
            case {"role": str(role)} if role in _ROLES and item.get("type", "message") == "message":
                messages.append({"role": role, "content": _content(item.get("content"), param)})
            case {"type": "function_call", "call_id": str(id_), "name": str(name), "arguments": str(given)}:
                function = {"name": name, "arguments": given}
                call: Json = {"id": id_, "type": "function", "function": function}
                _add_call(messages, call)
            case {"type": "function_call_output", "call_id": str(id_)}:
                output = _content(item.get("output"), param)
                messages.append({"role": "tool", "tool_call_id": id_, "content": output})
            case {"type": "reasoning"}:
                pass  # of earlier turns: it is no part of a prompt
            case _:
                raise BadRequest(
                    f"{param} must be a message, a function_call or a function_call_output",
                    param=param,
                    code="unsupported_parameter",
                )
    return messages


def _add_call(messages: list[Json], call: Json) -> None:
    """Append a call, to the assistant's turn before it if there is one: a chat has both in one message."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant":
        last = {"role": "assistant", "content": None}
        messages.append(last)
    calls = last.setdefault("tool_calls", [])
    assert isinstance(calls, list)
    calls.append(call)


def _content(given: object, param: str) -> str | list[Json]:
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise BadRequest(f"{param} must have a text or a list of parts", param=param)
    parts = [_part(part, f"{param}.content[{number}]") for number, part in enumerate(given)]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(str(part["text"]) for part in parts)
    return parts


def _part(part: Any, where: str) -> Json:
    match part:
        case {"type": str(kind), "text": str(text)} if kind in _TEXTS:
            return {"type": "text", "text": text}
        case {"type": "input_image", "image_url": str(url)}:
            return {"type": "image_url", "image_url": {"url": url}}
        case _:
            raise BadRequest(
                f"{where} must be an input_text, output_text or input_image with its image_url",
                param=where,
                code="unsupported_parameter",
            )


def _tool(tool: Object, param: str) -> Json:
    if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise BadRequest(
            f"{param} must be a function with a name: no server has other tools",
            param=param,
            code="unsupported_parameter",
        )
    names: Sequence[str] = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {n: tool[n] for n in names if tool.get(n) is not None}}


def _tool_choice(given: str | Object) -> str | Json:
    match given:
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case _:
            return given


def _text_format(form: Any) -> Json:
    match form:
        case {"type": "json_schema"}:
            names = ("name", "description", "schema", "strict")
            return {"type": "json_schema", "json_schema": {n: form[n] for n in names if n in form}}
        case {"type": str(kind)}:
            return {"type": kind}
        case _:
            raise BadRequest("text.format must have a type", param="text.format")
