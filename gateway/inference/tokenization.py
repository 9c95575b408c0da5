"""Prompts to token ids: encoding, chat rendering, and their validation."""

import asyncio
from collections.abc import Mapping, Sequence

from gateway.core.errors import BadRequest, Unprocessable
from gateway.inference.assets import ModelAssets
from registry.records.function import FunctionVersion

Prompt = str | Sequence[int]


class Encoder:
    """The encoder of one function version.

    Long texts are encoded in a thread, where the library releases the interpreter lock.
    """

    def __init__(self, version: FunctionVersion, assets: ModelAssets, *, inline_chars: int) -> None:
        self._version = version
        self._assets = assets
        self._inline_chars = inline_chars

    async def prompt(self, prompt: Prompt, *, param: str) -> tuple[int, ...]:
        """Return the ids of a text, with special tokens, or given ids unchanged. Raises BadRequest."""
        if not isinstance(prompt, str):
            return self._check_ids(prompt, param)
        ids = await self._encode(prompt, add_special_tokens=True, param=param)
        if not ids:
            raise BadRequest(f"'{param}' has no tokens", param=param)
        return ids

    async def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None,
        variables: Mapping[str, object] | None,
    ) -> tuple[int, ...]:
        """Return the ids of a conversation, rendered by the model's template. Raises BadRequest."""
        template = self._assets.template
        if tools and self._assets.tool_template is not None:
            template = self._assets.tool_template
        if template is None:
            raise self._no_tokenizer("messages")
        if tools and not template.takes_tools:
            raise BadRequest(
                f"the chat template of {self._version.function!r} does not support tools", param="tools"
            )
        size = sum(len(content) for m in messages if isinstance(content := m.get("content"), str))
        if size <= self._inline_chars and not tools:
            text = template.render(messages, tools=tools, variables=variables)
        else:
            text = await asyncio.to_thread(template.render, messages, tools=tools, variables=variables)
        ids = await self._encode(text, add_special_tokens=False, param="messages")
        if not ids:
            raise BadRequest("'messages' renders to no tokens", param="messages")
        return ids

    async def _encode(self, text: str, *, add_special_tokens: bool, param: str) -> tuple[int, ...]:
        tokenizer = self._assets.tokenizer
        if tokenizer is None:
            raise self._no_tokenizer(param)
        if len(text) <= self._inline_chars:
            return tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        encoding = await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def _check_ids(self, ids: Sequence[int], param: str) -> tuple[int, ...]:
        if not ids:
            raise BadRequest(f"'{param}' must not be empty", param=param)
        size = self._vocabulary()
        if min(ids) < 0 or (size is not None and max(ids) >= size):
            bound = "at least 0" if size is None else f"0 to {size - 1}"
            raise BadRequest(f"token ids of '{param}' must be {bound}", param=param)
        return tuple(ids)

    def _vocabulary(self) -> int | None:
        config = self._assets.config
        text_config = config.get("text_config")
        for source in (config, text_config if isinstance(text_config, dict) else {}):
            if isinstance(size := source.get("vocab_size"), int):
                return size
        return None if self._assets.tokenizer is None else self._assets.tokenizer.get_vocab_size()

    def _no_tokenizer(self, param: str) -> BadRequest:
        return BadRequest(
            f"function {self._version.function!r} has no tokenizer: give token ids instead of text",
            param=param,
        )


def split_prompts(given: str | Sequence[object], *, param: str, limit: int) -> list[Prompt]:
    """Return the prompts in a string, ids, a list of strings or a list of id lists.

    Raises Unprocessable, also for an empty string.
    """
    if isinstance(given, str):
        return [given]
    if not given:
        raise Unprocessable(f"'{param}' must not be empty", param=param)
    kinds = {type(item) for item in given}
    if kinds == {int}:
        return [[item for item in given if isinstance(item, int)]]
    if kinds == {str} or kinds == {list}:
        if len(given) > limit:
            raise Unprocessable(f"'{param}' must have at most {limit} items", param=param)
        for index, item in enumerate(given):
            if item == "":
                raise Unprocessable(f"'{param}[{index}]' must not be empty", param=f"{param}[{index}]")
        return [item for item in given if isinstance(item, str | list)]
    raise Unprocessable(
        f"'{param}' must be a string, a list of strings, a list of token ids or a list of such lists",
        param=param,
    )


def token_budget(
    version: FunctionVersion, prompt_tokens: int, requested: int | None, default: int | None
) -> int:
    """Return the number of tokens to generate at most. Raises BadRequest if the context is too short."""
    length = version.context_length
    if length <= 0:
        return requested or default or 16
    if prompt_tokens >= length:
        raise BadRequest(
            f"the prompt has {prompt_tokens} tokens; the model's context is {length}, output included",
            param="prompt",
            code="context_length_exceeded",
        )
    room = length - prompt_tokens
    if requested is None:
        return room if default is None else min(default, room)
    if requested > room:
        raise BadRequest(
            f"{prompt_tokens} prompt tokens and {requested} output tokens exceed the context of {length}",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return requested
