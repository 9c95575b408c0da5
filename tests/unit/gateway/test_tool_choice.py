"""The call that `tool_choice` forces: its schema, and what is refused."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from gateway.core.errors import BadRequest
from gateway.requests.grammar import requested_grammar
from gateway.requests.tool_choice import is_forced, tools_of
from gateway.schemas.openai import ChatRequest

CITY = {"type": "object", "properties": {"city": {"$ref": "#/$defs/city"}}, "required": ["city"]}
CITY |= {"additionalProperties": False, "$defs": {"city": {"enum": ["Rome", "Oslo"]}}}
HOUR = {"type": "object", "properties": {"city": {"$ref": "#/$defs/city"}}, "required": ["city"]}
HOUR |= {"additionalProperties": False, "$defs": {"city": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "time", "parameters": HOUR}},
    {"type": "function", "function": {"name": "stop"}},
]
BYTES = LLTokenizer("byte")


def _request(choice: Any, tools: Any = TOOLS, **fields: Any) -> ChatRequest:
    return ChatRequest(model="m", messages=[{}], tools=tools, tool_choice=choice, **fields)


def _named(name: str) -> dict[str, object]:
    return {"type": "function", "function": {"name": name}}


def _follows(grammar: str, call: object) -> bool:
    """Return whether the text of a call follows a grammar to its end."""
    matcher = LLMatcher(BYTES, grammar)
    tokens = list(json.dumps(call, separators=(",", ":")).encode())
    return (
        matcher.validate_tokens(tokens) == len(tokens)
        and matcher.consume_tokens(tokens)
        and (matcher.is_accepting())
    )


ROME = {"name": "weather", "arguments": {"city": "Rome"}}
SIX = {"name": "time", "arguments": {"city": 6}}
STOP = {"name": "stop", "arguments": {"why": ["done"]}}
WRONG = ({"name": "weather", "arguments": {"city": 6}}, {"name": "time", "arguments": {"city": "Rome"}})


def test_a_required_call_is_one_of_any_tool() -> None:
    grammar = requested_grammar(_request("required"))
    assert all(_follows(grammar, call) for call in (ROME, SIX, STOP))
    assert not any(_follows(grammar, call) for call in (*WRONG, {"name": "sing", "arguments": {}}, "hello"))


def test_a_named_call_is_of_that_tool() -> None:
    grammar = requested_grammar(_request(_named("time")))
    assert _follows(grammar, SIX)
    assert not any(_follows(grammar, call) for call in (ROME, STOP, *WRONG))


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_a_free_choice_has_no_grammar(choice: str | None) -> None:
    assert not is_forced(_request(choice)) and not requested_grammar(_request(choice))
    assert list(tools_of(_request(choice))) == ([] if choice == "none" else ["weather", "time", "stop"])


@pytest.mark.parametrize(
    "choice", [_named("sing"), "always", {"type": "function"}, {"function": {"name": "x"}}]
)
def test_a_wrong_choice_is_refused(choice: object) -> None:
    with pytest.raises(BadRequest, match="tool_choice") as refused:
        requested_grammar(_request(choice))
    assert refused.value.param == "tool_choice"


def test_a_forced_call_needs_tools_and_excludes_a_schema() -> None:
    with pytest.raises(BadRequest, match="they have: none"):
        requested_grammar(_request("required", tools=None))
    with pytest.raises(BadRequest, match="exclude each other"):
        requested_grammar(_request("required", response_format={"type": "json_object"}))


@given(
    st.recursive(
        st.none() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(st.sampled_from(("type", "properties", "$ref", "enum", "items")), inner)
        ),
        max_leaves=12,
    )
)
def test_any_parameters_make_a_grammar_or_a_refusal(parameters: Any) -> None:
    tools = [{"type": "function", "function": {"name": "odd", "parameters": parameters}}]
    try:
        assert requested_grammar(_request("required", tools=tools))
    except BadRequest as refused:
        assert refused.param == "tool_choice"
