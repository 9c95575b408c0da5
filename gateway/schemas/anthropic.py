"""Bodies of Anthropic's Messages API. Unknown fields are ignored, but for misspelt ones."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateway.schemas.openai import Name, Object, Objects, Seed, StopText, TokenCount, Words


class CountTokensRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of /v1/messages/count_tokens: what of a request is in its prompt.

    A message's `content` is a text or a list of blocks: `text`, `image`, `tool_use`, `tool_result`.
    """

    model: Name
    messages: Annotated[list[Object], Meta(min_length=1, max_length=4096)]
    system: Words | Objects | None = None
    tools: Objects | None = None
    tool_choice: Object | None = None
    thinking: Object | None = None


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    """Body of /v1/messages. `seed` and `ignore_eos` are as in /v1/completions."""

    max_tokens: TokenCount
    stop_sequences: Annotated[list[StopText], Meta(max_length=16)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    metadata: Object | None = None
    output_config: Object | None = None
    seed: Seed | None = None
    ignore_eos: bool | None = None
    # Refused unless they change nothing.
    container: Any = None
    mcp_servers: Any = None


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a message."""

    input_tokens: int
    output_tokens: int


class ContentBlock(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A text, or the use of a tool with its `input`."""

    type: Literal["text", "tool_use"]
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: Object | None = None


class MessageResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The response of /v1/messages. Streams have Anthropic's named events."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class TokenTotal(msgspec.Struct, frozen=True, kw_only=True):
    """The response of /v1/messages/count_tokens."""

    input_tokens: int


class AnthropicErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    message: str


class AnthropicError(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every error below /v1/messages."""

    type: Literal["error"]
    error: AnthropicErrorBody
    request_id: str
