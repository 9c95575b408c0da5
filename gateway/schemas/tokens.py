"""Bodies of /tokenize and /detokenize, as vLLM has them."""

from typing import Annotated

import msgspec
from msgspec import Meta

from gateway.schemas.openai import Name, Object, Objects, TokenId, Words

_MAX_TOKENS = (1 << 19) + 1


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of /tokenize: a `prompt`, or the `messages` of a chat."""

    model: Name
    prompt: Words | None = None
    messages: Annotated[list[Object], Meta(min_length=1, max_length=4096)] | None = None
    tools: Objects | None = None
    chat_template_kwargs: Object | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """`max_model_len` is the model's context, null where it is not known."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of /detokenize."""

    model: Name
    tokens: Annotated[list[TokenId], Meta(max_length=_MAX_TOKENS)]


class DetokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The text, special tokens included."""

    prompt: str
