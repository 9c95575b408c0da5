"""Requests of other protocols as the body of a chat."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import BadRequest
from gateway.requests.messages_input import chat_of_messages
from gateway.requests.responses_input import chat_of_response
from gateway.schemas.anthropic import MessagesRequest
from gateway.schemas.openai import ChatRequest
from gateway.schemas.responses import ResponsesRequest

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
TYPES = st.sampled_from(
    [
        *("text", "image", "tool_use", "tool_result", "thinking", "message", "input_text", "input_image"),
        *("function_call", "function_call_output", "reasoning", "function", "custom"),
    ]
)
PARTS = st.fixed_dictionaries(
    {"type": TYPES},
    optional={
        **dict.fromkeys(("text", "id", "name", "call_id", "tool_use_id", "arguments"), st.text(max_size=4)),
        **dict.fromkeys(("input", "content", "source", "output", "image_url", "parameters"), JSON),
    },
)
TURNS = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "system", "tool"]),
        "content": st.text(max_size=5) | st.lists(PARTS, max_size=3) | JSON,
        "type": TYPES,
        "call_id": st.text(max_size=4),
        "name": st.text(max_size=4),
        "arguments": st.text(max_size=4),
        "output": JSON,
    },
)


def message(**fields: Any) -> dict[str, Any]:
    return chat_of_messages(msgspec.convert({"model": "m", "max_tokens": 5, **fields}, MessagesRequest))


def response(**fields: Any) -> dict[str, Any]:
    return chat_of_response(msgspec.convert({"model": "m", **fields}, ResponsesRequest))


def test_a_conversation_with_tools_of_anthropic() -> None:
    use = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "warm"}]}
    made = message(
        system=[{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}],
        messages=[
            {"role": "user", "content": "How?"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "…"}, use]},
            {"role": "user", "content": [{"type": "text", "text": "And?"}, result]},
        ],
        tools=[{"name": "weather", "description": "d", "input_schema": {"type": "object"}}],
        tool_choice={"type": "any"},
        stop_sequences=["END"],
        metadata={"user_id": "u1"},
        temperature=0.5,
    )
    call = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    assert made == {
        "model": "m",
        "max_tokens": 5,
        "temperature": 0.5,
        "stop": ["END"],
        "user": "u1",
        "messages": [
            {"role": "system", "content": "Be\nbrief."},
            {"role": "user", "content": "How?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "t1", "content": "warm"},
            {"role": "user", "content": "And?"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {"name": "weather", "description": "d", "parameters": {"type": "object"}},
            }
        ],
        "tool_choice": "required",
    }


def test_an_image_of_anthropic_becomes_a_data_url() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    (turn,) = message(messages=[{"role": "user", "content": [image, {"type": "text", "text": "?"}]}])[
        "messages"
    ]
    assert turn["content"] == [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "text", "text": "?"},
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
        ({"container": "c"}, "container"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0]"),
    ],
)
def test_what_a_chat_cannot_express_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        message(**{"messages": [{"role": "user", "content": "a"}], **fields})
    assert (caught.value.param, caught.value.code) == (param, "unsupported_parameter")


def test_a_conversation_with_calls_of_openai() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}", "id": "fc-1"}
    made = response(
        instructions="Be brief.",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "How?"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "reasoning", "summary": []},
            call,
            {"type": "function_call_output", "call_id": "c1", "output": "warm"},
        ],
        tools=[{"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}],
        tool_choice={"type": "function", "name": "weather"},
        text={"format": {"type": "json_schema", "name": "s", "schema": {}}},
        max_output_tokens=5,
    )
    asked = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    assert made["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [asked]},
        {"role": "tool", "tool_call_id": "c1", "content": "warm"},
    ]
    assert made["tools"][0]["function"] == {
        "name": "weather",
        "parameters": {"type": "object"},
        "strict": True,
    }
    assert made["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
    assert made["response_format"] == {"type": "json_schema", "json_schema": {"name": "s", "schema": {}}}
    assert made["max_tokens"] == 5


@given(turns=st.lists(TURNS, min_size=1, max_size=3), tools=st.lists(PARTS, max_size=2) | st.none())
def test_any_conversation_is_a_chat_or_refused(turns: list[Any], tools: list[Any] | None) -> None:
    for make in (lambda: message(messages=turns, tools=tools), lambda: response(input=turns, tools=tools)):
        try:
            made = make()
        except BadRequest:
            continue
        assert isinstance(msgspec.convert(made, ChatRequest), ChatRequest)
        for one in made["messages"]:
            assert isinstance(one["content"], str | list | None)
