"""What vLLM's server answers: events in any pieces, usage that the client did not ask for."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from invoker.vllm.client import completion_request, token_outputs
from invoker.vllm.events import (
    MAX_EVENT_BYTES,
    BadAnswer,
    EventSplitter,
    ForwardedStream,
    ServerRefused,
    TokenUsage,
    prepare_request,
    refused,
    usage_of,
)
from registry.messages.forward import cache_salt
from tests.fixtures.engine import sequence

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


TOKEN = {"id": "x", "choices": [{"index": 0, "delta": {"content": "é"}, "finish_reason": None}]}
LAST = {"id": "x", "choices": [], "usage": USAGE}
STREAM = _event(TOKEN | {"usage": USAGE | {"completion_tokens": 1}}) + _event(LAST) + b"data: [DONE]\n\n"


@given(st.lists(st.integers(1, 40), max_size=20))
def test_events_may_come_in_any_pieces(sizes: list[int]) -> None:
    splitter, found, rest = EventSplitter(), list[bytes](), STREAM
    for size in [*sizes, len(STREAM)]:
        found += splitter.feed(rest[:size])
        rest = rest[size:]
    assert found == [line[6:] for line in STREAM.strip().split(b"\n\n")]


def test_comments_and_other_fields_are_no_events() -> None:
    splitter = EventSplitter()
    assert list(splitter.feed(b": ping\n\nevent: x\ndata: 1\n\nretry: 5\n\n")) == [b"1"]
    with pytest.raises(BadAnswer, match="more than"):
        list(splitter.feed(b"data: " + b"x" * (MAX_EVENT_BYTES + 1)))


@pytest.mark.parametrize(
    ("wants_usage", "wants_each", "shown"),
    [(False, False, [TOKEN]), (True, False, [TOKEN, LAST]), (True, True, None)],
)
def test_the_client_sees_the_usage_that_it_asked_for(
    wants_usage: bool, wants_each: bool, shown: list[dict[str, Any]] | None
) -> None:
    stream = ForwardedStream(wants_usage=wants_usage, wants_each=wants_each)
    found = [json.loads(event) for event in stream.feed(STREAM)]
    assert found == (shown or [TOKEN | {"usage": USAGE | {"completion_tokens": 1}}, LAST])
    assert stream.usage == TokenUsage(3, 2) and stream.is_over


def test_an_event_that_is_no_json_is_an_error() -> None:
    with pytest.raises(BadAnswer, match="not JSON"):
        list(ForwardedStream(wants_usage=False, wants_each=False).feed(b"data: <html>\n\n"))


def test_an_error_within_a_stream_ends_it() -> None:
    stream, found = ForwardedStream(wants_usage=False, wants_each=False), list[bytes]()
    with pytest.raises(ServerRefused, match="engine is dead") as failed:
        found.extend(stream.feed(b'data: {"error":{"message":"the engine is dead"}}\n\ndata: [DONE]\n\n'))
    assert failed.value.code == "internal" and not found and not stream.is_over


@pytest.mark.parametrize("value", [None, [], {}, {"usage": None}, {"usage": []}])
def test_what_has_no_usage(value: object) -> None:
    assert usage_of(value) is None


def test_strange_counts_are_none() -> None:
    assert usage_of({"usage": {"prompt_tokens": -1, "completion_tokens": "7"}}) == TokenUsage()


def test_requests_pass_as_they_are_but_for_the_model_and_the_usage() -> None:
    body = {"model": "f/sql", "messages": [], "tools": [{"x": 1}], "stream": True, "odd": {"a": [1]}}
    made = prepare_request(json.dumps(body).encode(), "r/0")
    options = {"include_usage": True, "continuous_usage_stats": True}
    assert json.loads(made.body) == body | {"request_id": "r/0", "stream_options": options}
    assert made.streams and not made.wants_usage and not made.wants_each
    asked = json.dumps(body | {"stream_options": {"include_usage": True}}).encode()
    assert prepare_request(asked, "r/0").wants_usage
    whole = prepare_request(b'{"model":"f"}', "r/0")
    assert not whole.streams and b"stream_options" not in whole.body
    with pytest.raises(ValueError, match="not a JSON object"):
        prepare_request(b"[]", "r/0")


def test_a_sequence_continues_from_its_tokens() -> None:
    one = sequence("r", [5, 6], max_tokens=8, min_tokens=3, eos_token_ids=(2,), stop_token_ids=(9,), seed=4)
    body = completion_request(one, "f")
    assert body["prompt"] == [5, 6] and (body["max_tokens"], body["min_tokens"]) == (8, 3)
    assert body["stop_token_ids"] == [9, 2] and body["ignore_eos"] and body["return_token_ids"]
    assert body["cache_salt"] == cache_salt(one.tenant)
    assert completion_request(replace(one, tenant="t"), "f")["cache_salt"] == cache_salt("t")
    further = replace(one, generated_ids=[7])
    moved = completion_request(further, "f")
    assert moved["prompt"] == [5, 6, 7] and (moved["max_tokens"], moved["min_tokens"]) == (7, 2)


@pytest.mark.parametrize(
    "asked", [{"presence_penalty": 1.0}, {"bad_words": ((3,),)}, {"grammar": "[0-9]"}, {"logprobs": 0}]
)
def test_what_vllm_would_not_continue_undisturbed_is_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(ServerRefused, match="vLLM's own server"):
        completion_request(sequence("r", [5], **asked), "f")


def test_tokens_of_an_event() -> None:
    chunk = {"choices": [{"token_ids": [4, 5], "finish_reason": "stop", "text": "x"}]}
    first, last = token_outputs(json.dumps(chunk).encode(), "r")
    assert (first.token_id, first.finish_reason, last.token_id, last.finish_reason) == (4, "", 5, "stop")
    (end,) = token_outputs(b'{"choices":[{"token_ids":[],"finish_reason":"length"}]}', "r")
    assert end.token_id is None and end.finish_reason == "length" and end.work == 0
    for event in (b"{}", b"[]", b"x", b'{"choices":[]}', b'{"choices":[{"token_ids":["a"]}]}'):
        with pytest.raises(BadAnswer):
            token_outputs(event, "r")


def test_errors_have_the_servers_message() -> None:
    assert str(refused(400, b'{"error":{"message":"too long"}}')) == "too long"
    assert refused(500, b"oops").code == "internal" and "status 500" in str(refused(500, b"oops"))
