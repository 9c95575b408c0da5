"""Tool calls in text, in whatever pieces it arrives."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.inference.tool_calls import ToolForm, ToolReader, tool_form

NAMES = ("weather", "time")
ONE = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TWO = '<tool_call>{"name": "time", "arguments": "{}"}</tool_call>'


def _read(form: ToolForm, text: str, cuts: list[int]) -> tuple[str, list[tuple[str, str]]]:
    reader, said, calls = ToolReader(form, NAMES), "", []
    for size in [*cuts, len(text)]:
        piece, text = text[:size], text[size:]
        more, found = reader.feed(piece)
        said, calls = said + more, calls + found
    rest, found = reader.finish()
    assert len({call.id for call in calls + found}) == len(calls + found)
    return said + rest, [(call.name, call.arguments) for call in calls + found]


CUTS = st.lists(st.integers(1, 30), max_size=30)


@given(CUTS)
def test_tagged_calls_among_text(cuts: list[int]) -> None:
    said, calls = _read(ToolForm.TAGGED, f"Let me see.\n{ONE}\n{TWO} Done <b>.", cuts)
    assert calls == [("weather", '{"city": "Rome"}'), ("time", "{}")]
    assert said.replace("\n", "") == "Let me see. Done <b>."


@pytest.mark.parametrize(
    "call",
    [
        '{"name": {"a": 1}}',
        '{"name": ["weather"]}',
        '{"name": "weather", "arguments": "\\ud800"}',
        "[[]]",
        "5",
    ],
)
def test_what_is_nearly_a_call_is_text(call: str) -> None:
    assert _read(ToolForm.WHOLE, call, []) == (call, [])
    tagged = f"<tool_call>{call}</tool_call>"
    assert _read(ToolForm.TAGGED, tagged, []) == (tagged, [])


@given(CUTS, st.text(max_size=60))
def test_text_without_a_call_stays_as_it_is(cuts: list[int], text: str) -> None:
    for form in ToolForm:
        assert _read(form, text, cuts) == (text, [])


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>not json</tool_call>",
        '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "weather"',
        "a <tool_ca",
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    assert _read(ToolForm.TAGGED, text, [3] * 40) == (text, [])


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "weather", "parameters": {"city": "Oslo"}}', [("weather", '{"city": "Oslo"}')]),
        (' [{"name": "time", "arguments": {}}, {"name": "time"}]', [("time", "{}"), ("time", "{}")]),
        ('<|python_tag|>{"name": "time", "parameters": {}}', [("time", "{}")]),
    ],
)
def test_whole_calls(text: str, calls: list[tuple[str, str]]) -> None:
    assert _read(ToolForm.WHOLE, text, [4] * 40) == ("", calls)
    assert _read(ToolForm.WHOLE, f"So: {text}", [4] * 40) == (f"So: {text}", [])


def test_arguments_are_json() -> None:
    _, calls = _read(ToolForm.TAGGED, ONE, [])
    assert json.loads(calls[0][1]) == {"city": "Rome"}


def test_the_form_is_that_of_the_template() -> None:
    assert tool_form("… <tool_call>\n{{ x }}") is ToolForm.TAGGED
    assert tool_form("… <|python_tag|> …") is tool_form("[TOOL_CALLS] …") is ToolForm.WHOLE
    assert tool_form("{{ messages }}") is None
