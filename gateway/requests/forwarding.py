"""Which requests for a function with another engine pass through to its own server, and what is sent. Pure.

A request that the native engine could serve is run by its token ids instead: the gateway tokenizes it, and it
continues elsewhere when its instance is lost.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import msgspec

from gateway.core.errors import BadRequest
from gateway.schemas.openai import ChatRequest, CompletionRequest, GenerateFields
from gateway.tenants.cost_estimates import WorkBound
from registry.records.function import FunctionVersion

MAX_CHOICES = 128
# Fields that a request by token ids carries out as the engine's own server does, on any instance.
_BY_TOKENS = frozenset(
    {
        *("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p"),
        *("top_k", "min_p", "n", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "stream"),
        *("stream_options", "return_token_ids", "logit_bias", "allowed_token_ids", "user", "echo"),
    }
)
# Where a tenant must not decide: the order of all requests, other instances, files and addresses.
_RESERVED = ("kv_transfer_params", "ec_transfer_params", "priority", "chat_template", "media_io_kwargs")
_MAX_DEPTH = 16
_OVERRIDE = "--override-generation-config"
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
_Payload = TypeVar("_Payload", CompletionRequest, ChatRequest)


def runs_by_tokens(
    payload: GenerateFields, fields: Mapping[str, msgspec.Raw], *, has_tokenizer: bool = True
) -> bool:
    """Return whether a request needs nothing of the engine's server but tokens.

    `has_tokenizer`: the gateway can make tokens of texts.
    """
    for field in fields:
        if field not in _BY_TOKENS and getattr(payload, field, ...) is not None:
            return False
    if isinstance(payload, CompletionRequest):
        return has_tokenizer or not _has_text(payload.prompt)
    plain = isinstance(payload, ChatRequest) and all(map(_is_plain, payload.messages))
    return plain and has_tokenizer


def _has_text(prompt: object) -> bool:
    return isinstance(prompt, str) or (isinstance(prompt, list) and any(map(_has_text, prompt[:1])))


def _is_plain(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    texts = (
        content is None
        or isinstance(content, str)
        or all(isinstance(part, dict) and part.get("type") == "text" for part in content)
    )
    return texts and not message.get("tool_calls") and message.get("role") != "tool"


def sampling_defaults(
    generation: Mapping[str, object], arguments: Sequence[str]
) -> Mapping[str, float] | None:
    """Return what vLLM samples with where a request says nothing: of generation_config.json, and arguments.

    None if they have something that a request by token ids does not carry out.
    """
    given = dict(generation)
    for flag, value in pairwise(arguments):
        if flag == _OVERRIDE:
            given |= _object(value)
    for argument in arguments:
        if argument.startswith(_OVERRIDE + "="):
            given |= _object(argument.partition("=")[2])
    found = {name: one for name in _DEFAULTS if isinstance(one := given.get(name), int | float)}
    if found.pop("repetition_penalty", 1) != 1:
        return None
    return found


def _object(text: str) -> dict[str, object]:
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except msgspec.DecodeError:  # vLLM's parser has refused it at deploy
        return {}


def with_defaults(payload: _Payload, defaults: Mapping[str, float]) -> _Payload:
    """Return the request with the defaults for the sampling that it leaves out."""
    fields = {name: value for name, value in defaults.items() if name in _DEFAULTS[:4]}
    if isinstance(payload, ChatRequest) and payload.max_completion_tokens is None:
        fields |= {"max_tokens": int(defaults["max_new_tokens"])} if "max_new_tokens" in defaults else {}
    missing = {name: value for name, value in fields.items() if getattr(payload, name) is None}
    if "top_k" in missing:
        missing["top_k"] = int(missing["top_k"])
    return msgspec.structs.replace(payload, **missing)


def forwarded_body(body: bytes, version: FunctionVersion, tenant: str, adapter: str = "") -> bytes:
    """Return the body for the engine's server, by the model or an adapter. Raises BadRequest.

    Prefixes are cached by tenant, so that none learns from a time what another has sent.
    """
    fields = msgspec.json.decode(body, type=dict[str, Any])
    for field in _RESERVED:
        if fields.get(field) is not None:
            raise BadRequest(f"{field} cannot be set by a request", param=field, code="unsupported_parameter")
    choices = fields.get("n")
    if isinstance(choices, int) and choices > MAX_CHOICES:
        raise BadRequest(f"n must be at most {MAX_CHOICES}", param="n")
    for reference in _references(fields.get("messages"), _MAX_DEPTH):
        if not reference.startswith("data:"):
            raise BadRequest(
                "images and other media must be data: URLs; the platform fetches nothing", param="messages"
            )
    fields["model"] = f"{version.function}/{adapter}" if adapter else version.function
    salt = f"{tenant}\0{fields.get('cache_salt') or ''}"
    fields["cache_salt"] = hashlib.sha256(salt.encode()).hexdigest()
    return msgspec.json.encode(fields)


def _references(value: object, depth: int) -> Iterator[str]:
    """Yield the addresses of media in messages. Raises BadRequest for what is nested too deeply."""
    if not isinstance(value, dict | list):
        return
    if not depth:
        raise BadRequest("messages are nested too deeply", param="messages")
    if isinstance(value, dict):
        for key, inner in value.items():
            if isinstance(inner, str) and (key == "url" or key.endswith("_url")):
                yield inner
            else:
                yield from _references(inner, depth - 1)
    else:
        for inner in value:
            yield from _references(inner, depth - 1)


def prompt_start(body: bytes) -> bytes:
    """Return what a request's prompt begins with, as JSON: tools, then messages or the text."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return b"".join(bytes(fields[name]) for name in ("tools", "messages", "prompt") if name in fields)


def bound_of(body: bytes, version: FunctionVersion) -> WorkBound:
    """Return what a forwarded request computes at most."""
    fields = msgspec.json.decode(body, type=dict[str, Any])
    longest = version.context_length or len(body)
    wanted = fields.get("max_completion_tokens") or fields.get("max_tokens")
    tokens = min(wanted, longest) if isinstance(wanted, int) and wanted > 0 else longest
    choices = fields.get("n")
    count = choices if isinstance(choices, int) and choices > 0 else 1
    return WorkBound(calls=count, prompt_tokens=min(len(body), longest), completion_tokens=count * tokens)
