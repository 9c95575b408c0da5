"""The grammar that a request wants its text to follow: JSON, a schema, a regex, choices or a grammar."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from gateway.core.errors import BadRequest
from gateway.requests.tool_choice import forced_schema, is_forced
from gateway.schemas.openai import ChatRequest, GenerateFields, Object

MAX_GRAMMAR_BYTES = 128 << 10
_MAX_CHOICES = 1024
_KINDS = ("json", "regex", "choice", "grammar")
_ANY_OBJECT = {"type": "object"}
_TEXT = {"type": "text"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextGrammar:
    """A grammar in llguidance's form, and the digest of the tokenizer.json with which texts follow it."""

    grammar: str
    tokenizer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRules:
    """What a text must and must not have; `bad_words` as token ids."""

    grammar: TextGrammar | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()


NO_RULES = TextRules()


def requested_grammar(request: GenerateFields) -> str:
    """Return the grammar of the request's text, checked, "" for none. It may take long. Raises BadRequest."""
    found = [
        (param, kind, value)
        for param, kind, value in (
            *_of_response_format(_TEXT if request.response_format is None else request.response_format),
            *_of_structured_outputs(request.structured_outputs or {}),
            *_of_tool_choice(request),
            *((f"guided_{kind}", kind, getattr(request, f"guided_{kind}")) for kind in _KINDS),
        )
        if value is not None
    ]
    if not found:
        return ""
    param, kind, value = found[0]
    if len(found) > 1:
        raise BadRequest(f"{param} and {found[1][0]} exclude each other: a text follows one", param=param)
    try:
        grammar = _grammar(kind, value)
    except (ValueError, TypeError, RecursionError) as error:
        raise BadRequest(f"{param}: {error}", param=param) from error
    if len(grammar) > MAX_GRAMMAR_BYTES:
        raise BadRequest(f"{param} has over {MAX_GRAMMAR_BYTES} bytes", param=param)
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if is_error:
        raise BadRequest(f"{param}: {messages[0]}", param=param)
    return grammar


def _of_response_format(given: Object) -> list[tuple[str, str, object]]:
    param = "response_format"
    match given.get("type"):
        case "text":
            return []
        case "json_object":
            return [(param, "json", _ANY_OBJECT)]
        case "json_schema":
            schema = given.get("json_schema")
            schema = schema.get("schema") if isinstance(schema, Mapping) else None
            if schema is None:
                raise BadRequest(f"{param}.json_schema.schema is missing", param=param)
            return [(param, "json", schema)]
        case kind:
            raise BadRequest(
                f"{param} of type {kind!r} is not supported: text, json_object or json_schema",
                param=param,
                code="unsupported_parameter",
            )


def _of_tool_choice(request: GenerateFields) -> list[tuple[str, str, object]]:
    if not isinstance(request, ChatRequest) or not is_forced(request):
        return []
    return [("tool_choice", "json", forced_schema(request))]


def _of_structured_outputs(given: Object) -> list[tuple[str, str, object]]:
    param = "structured_outputs"
    for key, value in given.items():
        if value is not None and key not in (*_KINDS, "json_object"):
            raise BadRequest(
                f"{param}.{key} is not supported: {', '.join(_KINDS)} or json_object",
                param=param,
                code="unsupported_parameter",
            )
    found = [(param, kind, given.get(kind)) for kind in _KINDS]
    return [*found, (param, "json", _ANY_OBJECT)] if given.get("json_object") else found


def _grammar(kind: str, value: object) -> str:
    """Return the grammar of one field. Raises ValueError, TypeError."""
    match kind, value:
        case "json", str():
            return _of_schema(value)
        case "json", dict():
            return _of_schema(json.dumps(value))
        case "regex", str():
            return LLMatcher.grammar_from_regex(value)
        case "choice", [*choices] if 0 < len(choices) <= _MAX_CHOICES and all(map(_is_text, choices)):
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, choices)))
        case "choice", _:
            raise ValueError(f"must be a list of 1 to {_MAX_CHOICES} texts")
        case "grammar", str():
            return LLMatcher.grammar_from_lark(any_to_lark(value))
        case _:
            raise ValueError("must be a text" if kind != "json" else "must be a schema")


def _of_schema(schema: str) -> str:
    # Small models fall into endless white space where it is allowed; a schema's `x-guidance` allows it.
    return LLMatcher.grammar_from_json_schema(schema, {"whitespace_flexible": False})


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)
