"""Responses of another engine's server on their way to the client."""

import json
from typing import Any

import pytest

from gateway.core.contract import DispatchError
from gateway.requests.forwarded_chat import Translated, Verbatim
from gateway.requests.messages_format import MESSAGES
from gateway.requests.reply_format import ReplyOptions, ReplyUsage

USAGE = ReplyUsage(prompt=5, completion=7)


def translated() -> Translated:
    options = ReplyOptions(
        id="msg-req-1",
        model="coder",
        created=7,
        token_text=str,
        token_ids=False,
        logprobs=None,
        include_usage=False,
    )
    return Translated(MESSAGES.make(options))


def chunk(delta: dict[str, Any], **more: object) -> bytes:
    return json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": None, **more}]}).encode()


def events(data: bytes) -> list[dict[str, Any]]:
    found = []
    for event in data.decode().split("\n\n")[:-1]:
        name, body = event.split("\n")
        found.append(json.loads(body.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def call(index: int, arguments: str, **more: object) -> dict[str, Any]:
    named = {"name": more.pop("name")} if "name" in more else {}
    return {"index": index, **more, "function": {**named, "arguments": arguments}}


def test_a_chat_with_calls_becomes_a_message() -> None:
    relay = translated()
    sent = b""
    for delta in (
        {"role": "assistant", "content": ""},
        {"content": "I "},
        {"content": "look."},
        {"tool_calls": [call(0, "", id="c1", name="weather")]},
        {"tool_calls": [call(0, '{"city": ')]},
        {"tool_calls": [call(1, '{"city": "Oslo"}', id="c2", name="weather"), call(0, '"Rome"}')]},
    ):
        sent += relay.pass_on(chunk(delta))
    sent += relay.pass_on(chunk({}, finish_reason="tool_calls"))
    sent += relay.pass_on(b'{"choices":[],"usage":{"prompt_tokens":5}}')
    sent += relay.end(USAGE, {})
    found = events(sent)
    assert [event["type"] for event in found] == [
        "message_start",
        *("content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop") * 2,
        *("message_delta", "message_stop"),
    ]
    blocks = [event["content_block"] for event in found if event["type"] == "content_block_start"]
    assert blocks[0] == {"type": "text", "text": ""}
    assert [(one["id"], one["name"], one["input"]) for one in blocks[1:]] == [
        ("c1", "weather", {}),
        ("c2", "weather", {}),
    ]
    given = [
        e["delta"]["partial_json"] for e in found if e.get("delta", {}).get("type") == "input_json_delta"
    ]
    assert [json.loads(one) for one in given] == [{"city": "Rome"}, {"city": "Oslo"}]
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert found[-2]["usage"] == {"input_tokens": 5, "output_tokens": 7}


async def test_a_whole_chat_becomes_a_message() -> None:
    tool = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    chat = {"choices": [{"message": {"content": None, "tool_calls": [tool]}, "finish_reason": "tool_calls"}]}
    made = json.loads(await translated().whole(json.dumps(chat).encode(), USAGE))
    use = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rome"}}
    assert (made["content"], made["stop_reason"]) == ([use], "tool_use")
    stopped = {"choices": [{"message": {"content": "a"}, "finish_reason": "stop", "stop_reason": "END"}]}
    made = json.loads(await translated().whole(json.dumps(stopped).encode(), USAGE))
    assert (made["stop_reason"], made["stop_sequence"]) == ("stop_sequence", "END")


def test_what_is_no_chat_is_an_error() -> None:
    with pytest.raises(DispatchError, match="no chat"):
        translated().pass_on(b'{"choices": 5}')


def test_as_it_is_the_end_of_a_choice_is_held_back_until_the_bill() -> None:
    relay = Verbatim()
    one, ends, other = b'{"a":1}', b'{"finish_reason":"stop"}', b'{"b":2}'
    assert relay.pass_on(one) == b"data: %b\n\n" % one
    assert relay.pass_on(ends) == b""
    assert relay.pass_on(other) == b"data: %b\n\ndata: %b\n\n" % (ends, other)
    assert relay.pass_on(ends) == b""
    usage = b'{"choices":[],"usage":{}}'
    assert relay.pass_on(usage) == b""
    assert relay.end(USAGE, {}) == b"data: %b\n\ndata: %b\n\ndata: [DONE]\n\n" % (ends, usage)
