"""Which requests pass through to another engine's server, and what it gets of them."""

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from gateway.core.errors import ApiError, BadRequest, Unprocessable
from gateway.core.settings import RequestLimits
from gateway.requests.forwarded_reply import refused
from gateway.requests.forwarding import (
    ForwardPlan,
    plan_forward,
    runs_by_tokens,
    sampling_defaults,
    with_defaults,
)
from gateway.schemas.openai import ChatRequest, CompletionRequest
from registry.messages.forward import cache_salt
from tests.fixtures.control import make_version

HELLO = [{"role": "user", "content": "hello"}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}


def _plan(body: bytes | dict[str, Any], tenant: str = "t", assets: tuple[str, ...] = ()) -> ForwardPlan:
    data = body if isinstance(body, bytes) else json.dumps({"model": "f", **body}).encode()
    version = replace(make_version(), assets=dict.fromkeys(assets, "ab" * 32))  # of 1024 tokens
    return plan_forward(data, version, tenant, RequestLimits())


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
        {"messages": [{"role": "user", "content": 5}]},
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
    fields = {"messages": HELLO, "odd": [1, {"a": 2}]}
    one, other = (json.loads(_plan(fields, tenant).body) for tenant in ("a", "b"))
    assert one.pop("cache_salt") == cache_salt("a") != other.pop("cache_salt")
    assert one == other == {"model": "f", **fields}
    salted = json.loads(_plan({**fields, "cache_salt": "x"}, "a").body)["cache_salt"]
    assert salted == cache_salt("a", "x") != cache_salt("a")


def test_an_adapter_is_one_of_the_function() -> None:
    files = ("lora/sql/adapter_config.json", "lora/sql/adapter_model.safetensors")
    assert json.loads(_plan(b'{"model":"f:1/sql"}', assets=files).body)["model"] == "f/sql"
    with pytest.raises(ApiError, match="has no adapter 'chat'; it has: sql") as unknown:
        _plan(b'{"model":"f/chat"}', assets=files)
    assert unknown.value.status == 404


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kv_transfer_params": {}}, "kv_transfer_params cannot be set"),
        ({"priority": -1}, "priority cannot be set"),
        ({"chat_template": "{{ x }}"}, "chat_template cannot be set"),
        ({"n": 10_000}, "must be 1 to 128"),
        ({"n": -1}, "must be 1 to 128"),
        ({"n": "16000"}, "n must be of the type int"),
        ({"n": 16000.0}, "n must be of the type int"),
        ({"prompt": ["a"] * 65, "n": 2}, "must be 1 to 128"),
        ({"stream": "true"}, "stream must be of the type bool"),
        ({"cache_salt": 5}, "cache_salt must be of the type str"),
        ({"messages": [{"role": "user", "content": [{**IMAGE, "uuid": "a"}]}]}, "uuid of a part"),
        (
            {"messages": [{"role": "user", "content": [{"image_url": {"url": "http://10.0.0.1/"}}]}]},
            "data: URLs",
        ),
        ({"messages": [{"role": "user", "content": [{"audio_url": "file:///etc/passwd"}]}]}, "data: URLs"),
    ],
)
def test_what_a_tenant_may_not_decide(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        _plan({"messages": HELLO, **fields})


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
    for depth, words in ((32, "nested too deeply"), (1000, "nests deeper than 64 levels")):
        with pytest.raises(BadRequest, match=words):
            _plan(b'{"model":"f","messages":%b%b}' % (b"[" * depth, b"]" * depth))


@pytest.mark.parametrize("body", [b'{"model":"f","prompt":"\xff"}', b"{", b'{"prompt":"\\ud800"}'])
def test_what_is_not_json_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest, match="not valid JSON"):
        _plan(body)


def test_what_a_request_computes_at_most() -> None:
    assert _plan({"max_tokens": 5, "n": 3}).bound.completion_tokens == 15
    assert _plan({"max_tokens": 99999}).bound.completion_tokens == 1024
    bound = _plan(b'{"a":1}').bound
    assert (bound.calls, bound.prompt_tokens, bound.completion_tokens) == (1, 7, 1024)
    many = _plan({"prompt": ["word " * 2000] * 4, "n": 2, "max_tokens": 10}).bound
    assert (many.calls, many.prompt_tokens, many.completion_tokens) == (8, 4096, 80)
    with pytest.raises(Unprocessable, match="at most 128 items"):
        _plan({"prompt": ["a"] * 129})


def test_prompts_of_one_beginning_have_one_prefix() -> None:
    def prefix(text: str, tenant: str = "t", **fields: Any) -> int:
        return _plan({"prompt": text, **fields}, tenant).prefix

    start = "system " * 100
    assert prefix(start + "a") == prefix(start + "b", temperature=1) != 0
    assert prefix(start, "other") != prefix(start) != prefix("other " * 100)
    assert prefix("short") == 0


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
