"""Which requests pass through to another engine's server, and what it gets of them."""

import json
from typing import Any

import msgspec
import pytest

from gateway.core.errors import BadRequest
from gateway.requests.forwarded_reply import refused
from gateway.requests.forwarding import (
    bound_of,
    forwarded_body,
    runs_by_tokens,
    sampling_defaults,
    with_defaults,
)
from gateway.schemas.openai import ChatRequest, CompletionRequest
from tests.fixtures.control import make_version

HELLO = [{"role": "user", "content": "hello"}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}


def _chat(**fields: Any) -> bool:
    body = json.dumps({"model": "f", "messages": HELLO, **fields}).encode()
    payload = msgspec.json.decode(body, type=ChatRequest)
    return runs_by_tokens(payload, msgspec.json.decode(body, type=dict[str, msgspec.Raw]))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0, "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}},
        {"tools": None, "response_format": None, "n": 2, "stop": ["x"], "seed": 1, "return_token_ids": True},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
    ],
)
def test_plain_requests_run_by_their_tokens(fields: dict[str, Any]) -> None:
    assert _chat(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function"}]},
        {"response_format": {"type": "json_object"}},
        {"logprobs": True},
        {"frequency_penalty": 0.5},
        {"guided_regex": "a"},
        {"something_new": 1},
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        {"messages": [*HELLO, {"role": "tool", "content": "x", "tool_call_id": "y"}]},
    ],
)
def test_others_pass_through(fields: dict[str, Any]) -> None:
    assert not _chat(**fields)


def test_completions_by_tokens() -> None:
    body = b'{"model":"f","prompt":[1,2],"echo":true}'
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    payload = msgspec.json.decode(body, type=CompletionRequest)
    assert runs_by_tokens(payload, fields) and runs_by_tokens(payload, fields, has_tokenizer=False)
    text = msgspec.json.decode(b'{"model":"f","prompt":["x"]}', type=CompletionRequest)
    assert not runs_by_tokens(text, fields, has_tokenizer=False)


def test_the_server_gets_all_fields_and_a_salt_of_the_tenant() -> None:
    body = json.dumps({"model": "f", "messages": HELLO, "odd": [1, {"a": 2}]}).encode()
    one, other = (json.loads(forwarded_body(body, make_version(), tenant)) for tenant in ("a", "b"))
    assert one.pop("cache_salt") != other.pop("cache_salt")
    assert one == other == json.loads(body)
    adapted = forwarded_body(b'{"model":"f:1/sql"}', make_version(), "a", "sql")
    assert json.loads(adapted)["model"] == "f/sql"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kv_transfer_params": {}}, "kv_transfer_params cannot be set"),
        ({"priority": -1}, "priority cannot be set"),
        ({"chat_template": "{{ x }}"}, "chat_template cannot be set"),
        ({"n": 10_000}, "n must be at most"),
        (
            {"messages": [{"role": "user", "content": [{"image_url": {"url": "http://10.0.0.1/"}}]}]},
            "data: URLs",
        ),
        ({"messages": [{"role": "user", "content": [{"audio_url": "file:///etc/passwd"}]}]}, "data: URLs"),
    ],
)
def test_what_a_tenant_may_not_decide(fields: dict[str, Any], words: str) -> None:
    body = json.dumps({"model": "f", "messages": HELLO, **fields}).encode()
    with pytest.raises(BadRequest, match=words):
        forwarded_body(body, make_version(), "t")


def test_sampling_has_the_defaults_of_vllm() -> None:
    config = {"temperature": 0.6, "top_k": 20.0, "eos_token_id": 5, "max_new_tokens": 7, "do_sample": True}
    assert sampling_defaults(config, ()) == {"temperature": 0.6, "top_k": 20.0, "max_new_tokens": 7}
    override = ("--seed", "1", "--override-generation-config", '{"temperature": 0.1, "top_p": 0.9}')
    defaults = sampling_defaults(config, override)
    assert defaults == {"temperature": 0.1, "top_k": 20.0, "max_new_tokens": 7, "top_p": 0.9}
    assert sampling_defaults({}, ('--override-generation-config={"repetition_penalty": 1.2}',)) is None
    assert sampling_defaults({"repetition_penalty": 1.0}, ("--override-generation-config", "?")) == {}
    chat = ChatRequest(model="f", messages=HELLO, temperature=0.0)
    made = with_defaults(chat, defaults)
    assert (made.temperature, made.top_k, made.top_p, made.max_tokens) == (0.0, 20, 0.9, 7)
    assert with_defaults(CompletionRequest(model="f", prompt="x"), defaults).max_tokens is None


def test_nesting_is_bounded() -> None:
    nested: Any = "x"
    for _ in range(64):
        nested = [nested]
    with pytest.raises(BadRequest, match="nested too deeply"):
        forwarded_body(json.dumps({"model": "f", "messages": nested}).encode(), make_version(), "t")


def test_what_a_request_computes_at_most() -> None:
    version = make_version()  # of 1024 tokens
    assert bound_of(b'{"max_tokens":5,"n":3}', version).completion_tokens == 15
    assert bound_of(b'{"max_tokens":99999}', version).completion_tokens == 1024
    bound = bound_of(b"{}", version)
    assert (bound.calls, bound.prompt_tokens, bound.completion_tokens) == (1, 2, 1024)


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (
            400,
            b'{"error":{"message":"too long","param":"messages","code":400}}',
            (400, "bad_request", "messages"),
        ),
        (404, b'{"error":{"message":"no adapter"}}', (404, "model_not_found", "model")),
        (422, b'{"message":"bad"}', (400, "bad_request", None)),
        (503, b"", (503, "overloaded", None)),
        (500, b"<html>", (500, "internal", None)),
    ],
)
def test_errors_become_our_envelope(status: int, body: bytes, expected: tuple[int, str, str | None]) -> None:
    error = refused(status, body)
    assert (error.status, error.code, error.param) == expected
