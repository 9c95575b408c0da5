"""Bodies of OpenAI's Responses API. Unknown fields are ignored, but for misspelt ones."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateway.schemas.openai import Name, Object, Objects, Seed, ShortWords, TokenCount, Words


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of /v1/responses. `seed` and `ignore_eos` are as in /v1/completions.

    `input` is a text or a list of items: messages, `function_call`, `function_call_output`. Nothing is
    stored, so each request carries its whole conversation.
    """

    model: Name
    input: Words | Annotated[list[Object], Meta(min_length=1, max_length=4096)]
    instructions: Words | None = None
    max_output_tokens: TokenCount | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    stream: bool | None = None
    tools: Objects | None = None
    tool_choice: ShortWords | Object | None = None
    parallel_tool_calls: bool | None = None
    text: Object | None = None
    metadata: Annotated[dict[ShortWords, ShortWords], Meta(max_length=16)] | None = None
    user: ShortWords | None = None
    store: bool | None = None
    seed: Seed | None = None
    ignore_eos: bool | None = None
    # Refused unless they change nothing.
    background: bool | None = None
    conversation: Any = None
    include: Any = None
    max_tool_calls: Any = None
    previous_response_id: Any = None
    prompt: Any = None
    reasoning: Any = None
    top_logprobs: Any = None
    truncation: ShortWords | None = None


class InputDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct, frozen=True, kw_only=True):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputDetails = InputDetails()
    output_tokens: int
    output_tokens_details: OutputDetails = OutputDetails()
    total_tokens: int


class IncompleteDetails(msgspec.Struct, frozen=True, kw_only=True):
    reason: Literal["max_output_tokens"]


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True):
    """The response of /v1/responses. Streams have OpenAI's named events.

    `output` has messages with `output_text` parts, and `function_call` items.
    """

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: Object | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[Object]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: Object = {}
    store: Literal[False] = False
    temperature: float | None
    text: Object
    tool_choice: str | Object
    tools: list[Object]
    top_p: float | None
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]
