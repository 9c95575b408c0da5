"""Bodies of the OpenAI endpoints. Unknown fields are ignored, as clients send many, but for misspelt ones."""

from collections.abc import Mapping
from difflib import get_close_matches
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
_NEARLY = 0.85  # of the letters are the same: temprature, max_token
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

    `top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `allowed_token_ids`, `stop_token_ids`, `ignore_eos`,
    `return_token_ids`, `structured_outputs` and `guided_…` are as in vLLM.
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
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    logit_bias: (
        Annotated[dict[ShortWords, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] | None
    ) = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=1024)] | None = None
    bad_words: Annotated[list[StopText], Meta(max_length=64)] | None = None
    user: ShortWords | None = None
    response_format: Object | None = None
    structured_outputs: Object | None = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    # Fields of vLLM and OpenAI that are not implemented: see `refuse_unsupported`.
    add_special_tokens: bool | None = None
    echo: bool | None = None
    include_stop_str_in_output: bool | None = None
    logits_processors: Any = None
    prompt_logprobs: Any = None
    return_tokens_as_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: Any = None
    use_beam_search: bool | None = None


class CompletionRequest(GenerateFields, frozen=True, kw_only=True):
    """Body of /v1/completions. `prompt`: a text, a list of texts, token ids or a list of id lists.

    `echo` puts the prompt before each choice's text.
    """

    prompt: Input
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None
    suffix: Words | None = None
    prompt_embeds: Any = None


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
    chat_template_kwargs: Object | None = None
    add_generation_prompt: bool | None = None
    audio: Any = None
    chat_template: Any = None
    continue_final_message: bool | None = None
    documents: Any = None
    mm_processor_kwargs: Any = None
    modalities: Any = None
    web_search_options: Any = None


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


# Fields that would change the output but are not implemented: refused unless they are null or as here.
_UNSUPPORTED: Mapping[str, object] = {
    **dict.fromkeys(("use_beam_search", "include_stop_str_in_output"), False),
    **dict.fromkeys(("return_tokens_as_token_ids", "continue_final_message"), False),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "add_generation_prompt"), True),
    **dict.fromkeys(("prompt_embeds", "prompt_logprobs", "truncate_prompt_tokens"), None),
    **dict.fromkeys(("audio", "chat_template", "mm_processor_kwargs", "web_search_options"), None),
    "documents": [],
    "functions": [],
    "logits_processors": [],
    "modalities": ["text"],
    "suffix": "",
}


def refuse_unsupported(request: GenerateFields) -> None:
    """Raise BadRequest for a field that would change the output but is not implemented."""
    for field, no_effect in _UNSUPPORTED.items():
        value = getattr(request, field, None)
        if value is not None and value != no_effect:
            raise _unsupported(field)
    match request:
        case CompletionRequest(best_of=int(best_of)) if best_of > (request.n or 1):
            raise _unsupported("best_of")
        case CompletionRequest(echo=True, logprobs=int()):
            raise BadRequest(
                "echo with logprobs is not supported: there are none of a prompt's tokens",
                param="echo",
                code="unsupported_parameter",
            )
        case ChatRequest(echo=True):
            raise _unsupported("echo")
        case CompletionRequest(add_special_tokens=False) | ChatRequest(add_special_tokens=True):
            raise _unsupported("add_special_tokens")
        case _:
            pass


def refuse_misspelt(body: bytes | bytearray, request: type[msgspec.Struct]) -> None:
    """Raise BadRequest for a field of `body`, which decodes, with nearly the name of a known one."""
    known = request.__struct_fields__
    for field in msgspec.json.decode(body, type=dict[str, msgspec.Raw]):
        if field not in known and (near := get_close_matches(field, known, n=1, cutoff=_NEARLY)):
            raise BadRequest(
                f"unknown field {field!r}: did you mean {near[0]}?", param=field, code="unknown_parameter"
            )


def _unsupported(field: str) -> BadRequest:
    return BadRequest(
        f"{field} is not supported by the native engine: deploy the model with --engine vllm to use it",
        param=field,
        code="unsupported_parameter",
    )
