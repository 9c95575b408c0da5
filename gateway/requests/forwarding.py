"""Which requests for a function with another engine pass through to its own server, and what is sent. Pure.

A request that the native engine could serve is run by its token ids instead: the gateway tokenizes it, and it
continues elsewhere when its instance is lost.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec

from gateway.core.errors import ApiError, BadRequest
from gateway.core.prefix import prefix_of_text
from gateway.core.settings import RequestLimits
from gateway.http.limits import decode
from gateway.inference.tokenization import split_prompts
from gateway.schemas.openai import ChatRequest, CompletionRequest, GenerateFields
from gateway.tenants.cost_estimates import WorkBound
from registry.images.adapters import adapters_of, model_of, split_adapter
from registry.messages.forward import cache_salt
from registry.records.function import FunctionVersion

_FIELDS = msgspec.json.Decoder(dict[str, Any])
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
# Fields by which a request is billed, bounded and separated: the server would take other types, too.
_KINDS: Mapping[str, type] = {"n": int, "stream": bool, "cache_salt": str}
_PROMPT_FIELDS = ("tools", "messages", "prompt")
_MAX_DEPTH = 16
_OVERRIDE = "--override-generation-config"
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")


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
    if isinstance(content, list):
        texts = all(isinstance(part, dict) and part.get("type") == "text" for part in content)
    else:
        texts = content is None or isinstance(content, str)
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


def with_defaults(
    payload: CompletionRequest | ChatRequest, defaults: Mapping[str, float]
) -> CompletionRequest | ChatRequest:
    """Return the request with the defaults for the sampling that it leaves out."""
    fields = {name: value for name, value in defaults.items() if name in _DEFAULTS[:4]}
    if isinstance(payload, ChatRequest) and payload.max_completion_tokens is None:
        fields |= {"max_tokens": int(defaults["max_new_tokens"])} if "max_new_tokens" in defaults else {}
    missing = {name: value for name, value in fields.items() if getattr(payload, name) is None}
    if "top_k" in missing:
        missing["top_k"] = int(missing["top_k"])
    return msgspec.structs.replace(payload, **missing)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPlan:
    """What the engine's server gets of a request, and what it computes at most."""

    body: bytes
    bound: WorkBound
    prefix: int
    streams: bool


def plan_forward(body: bytes, version: FunctionVersion, tenant: str, limits: RequestLimits) -> ForwardPlan:
    """Return how a request passes through. It may take long. Raises ApiError."""
    fields = decode(body, _FIELDS, limits)
    _refuse_reserved(fields)
    _, adapter = split_adapter(str(fields.get("model") or ""))
    if adapter:
        _check_adapter(adapter, version)
    bound = _bound_of(fields, len(body), version, limits.calls)
    start = b"".join(msgspec.json.encode(fields[name]) for name in _PROMPT_FIELDS if name in fields)
    fields["model"] = model_of(version.function, adapter)
    fields["cache_salt"] = cache_salt(tenant, fields.get("cache_salt") or "")
    return ForwardPlan(
        body=msgspec.json.encode(fields),
        bound=bound,
        prefix=prefix_of_text(tenant, version.version, start),
        streams=fields.get("stream") or False,
    )


def _refuse_reserved(fields: Mapping[str, Any]) -> None:
    for field in _RESERVED:
        if fields.get(field) is not None:
            raise BadRequest(f"{field} cannot be set by a request", param=field, code="unsupported_parameter")
    for field, kind in _KINDS.items():
        if not isinstance(fields.get(field), kind | None):
            raise BadRequest(f"{field} must be of the type {kind.__name__}", param=field)
    _check_media(fields.get("messages"), _MAX_DEPTH)


def _check_adapter(adapter: str, version: FunctionVersion) -> None:
    known = adapters_of(version.assets)
    if adapter not in known:
        raise ApiError(
            404,
            "model_not_found",
            f"{version.function} has no adapter {adapter[:80]!r}; it has: {', '.join(known) or 'none'}",
            param="model",
        )


def _check_media(value: object, depth: int) -> None:
    """Raise BadRequest for media in messages that the server would fetch, or take from its cache by name."""
    if not isinstance(value, dict | list):
        return
    if not depth:
        raise BadRequest("messages are nested too deeply", param="messages")
    if isinstance(value, list):
        for inner in value:
            _check_media(inner, depth - 1)
        return
    for key, inner in value.items():
        if key == "uuid" and inner is not None:
            raise BadRequest(
                "uuid of a part cannot be set by a request: media are cached by their content",
                param="messages",
                code="unsupported_parameter",
            )
        if not (isinstance(inner, str) and (key == "url" or key.endswith("_url"))):
            _check_media(inner, depth - 1)
        elif not inner.startswith("data:"):
            raise BadRequest(
                "images and other media must be data: URLs; the platform fetches nothing", param="messages"
            )


def _bound_of(fields: Mapping[str, Any], nbytes: int, version: FunctionVersion, most: int) -> WorkBound:
    """Return what a request computes at most. Raises ApiError for more than `most` choices in all."""
    prompt, choices = fields.get("prompt"), fields.get("n") or 1
    prompts = len(split_prompts(prompt, param="prompt", limit=most)) if isinstance(prompt, list) else 1
    count = prompts * choices
    if not 0 < count <= most:
        raise BadRequest(f"the number of prompts times n must be 1 to {most}", param="n")
    longest = version.context_length or nbytes
    wanted = fields.get("max_completion_tokens") or fields.get("max_tokens")
    tokens = min(wanted, longest) if isinstance(wanted, int) and wanted > 0 else longest
    return WorkBound(
        calls=count, prompt_tokens=min(nbytes, prompts * longest), completion_tokens=count * tokens
    )
