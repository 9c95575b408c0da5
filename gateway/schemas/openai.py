"""Bodies of the OpenAI endpoints. Unknown fields are ignored, since clients send many."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateway.core.errors import BadRequest

Name = Annotated[str, Meta(min_length=1, max_length=128)]
TokenCount = Annotated[int, Meta(ge=1, le=10_000_000)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
StopText = Annotated[str, Meta(min_length=1, max_length=1024)]
Stops = StopText | Annotated[list[StopText], Meta(max_length=16)] | None
# The bounds of a body (gateway/core/settings.py), repeated for the OpenAPI document.
_MAX_TEXT = 4 << 20
_MAX_ITEMS = (1 << 19) + 1
Words = Annotated[str, Meta(max_length=_MAX_TEXT)]
ShortWords = Annotated[str, Meta(max_length=1024)]
Ids = Annotated[list[int], Meta(max_length=_MAX_ITEMS)]
Input = (
    Annotated[str, Meta(min_length=1, max_length=_MAX_TEXT)]
    | Annotated[list[Words | int | Ids], Meta(min_length=1, max_length=_MAX_ITEMS)]
)
Object = dict[str, Any]
Objects = Annotated[list[Object], Meta(max_length=256)]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`include_usage`: a last chunk with the usage of the whole request."""

    include_usage: bool | None = False


class GenerateFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that completions and chat share.

    `top_k`, `stop_token_ids`, `ignore_eos` and `return_token_ids` are as in vLLM.
    """

    model: Name
    max_tokens: TokenCount | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    seed: Seed | None = None
    stop: Stops = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=10_000_000)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[dict[ShortWords, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] | None
    ) = None
    user: ShortWords | None = None


class CompletionRequest(GenerateFields, frozen=True, kw_only=True):
    """Body of /v1/completions. `prompt`: a text, a list of texts, token ids or a list of id lists."""

    prompt: Input
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None
    suffix: Words | None = None


class ContentPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a message; only `text` parts are supported."""

    type: ShortWords
    text: Words | None = None


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Words | Annotated[list[ContentPart], Meta(max_length=4096)] | None = None
    name: ShortWords | None = None
    tool_calls: Objects | None = None
    tool_call_id: ShortWords | None = None


class ChatRequest(GenerateFields, frozen=True, kw_only=True):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Object], Meta(min_length=1, max_length=4096)]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: Objects | None = None
    tool_choice: ShortWords | Object | None = None
    functions: Objects | None = None
    response_format: Object | None = None
    chat_template_kwargs: Object | None = None


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of /v1/embeddings."""

    model: Name
    input: Input
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=65_536)] | None = None
    user: ShortWords | None = None


class UsageInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a request."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A function as /v1/models shows it."""

    id: str
    created: int
    owned_by: str
    object: Literal["model"] = "model"


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str


class ErrorEnvelope(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every error."""

    error: ErrorBody


def refuse_unsupported(request: GenerateFields) -> None:
    """Raise BadRequest for a field that would change the output but is not implemented."""
    used: list[tuple[str, bool]] = [
        ("frequency_penalty", bool(request.frequency_penalty)),
        ("presence_penalty", bool(request.presence_penalty)),
        ("logit_bias", bool(request.logit_bias)),
        ("min_tokens", bool(request.min_tokens)),
    ]
    match request:
        case CompletionRequest():
            used += [
                ("echo", bool(request.echo)),
                ("suffix", bool(request.suffix)),
                ("best_of", request.best_of is not None and request.best_of > (request.n or 1)),
            ]
        case ChatRequest():
            form = (request.response_format or {}).get("type", "text")
            used += [
                ("functions", bool(request.functions)),
                ("tool_choice", request.tool_choice not in (None, "auto", "none")),
                ("response_format", form != "text"),
            ]
    for field, present in used:
        if present:
            raise BadRequest(f"{field} is not supported", param=field, code="unsupported_parameter")
