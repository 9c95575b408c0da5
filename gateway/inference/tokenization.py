"""Prompts to token ids: encoding, chat rendering, and their validation."""

from collections.abc import Mapping, Sequence
from functools import partial

from gateway.core.errors import BadRequest, Unprocessable
from gateway.core.executors import FairExecutor
from gateway.inference.assets import ModelAssets
from registry.records.function import FunctionTask, FunctionVersion

Prompt = str | Sequence[int]

# No vocabulary has longer tokens, so a text can be too long whatever it says.
_MAX_TOKEN_CHARS = 256


class Encoder:
    """The encoder of one function version for one tenant.

    Texts of more than `inline_chars` in all are encoded by the executor. What is certainly too long for the
    context is refused by its characters.
    """

    def __init__(
        self,
        version: FunctionVersion,
        assets: ModelAssets,
        executor: FairExecutor,
        tenant: str,
        *,
        inline_chars: int,
    ) -> None:
        self._version = version
        self._assets = assets
        self._executor = executor
        self._tenant = tenant
        self._inline_chars = inline_chars

    async def prompts(self, prompts: Sequence[Prompt], *, param: str) -> list[tuple[int, ...]]:
        """Return the ids of texts, with special tokens, or given ids unchanged. Raises BadRequest."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        given = [self._check_ids(prompt, param) for prompt in prompts if not isinstance(prompt, str)]
        # A request has texts or ids, not both.
        ids = given or await self._encode(texts, param)
        self._check_lengths(list(map(len, ids)), param)
        for one in ids:
            if not one:
                raise BadRequest(f"'{param}' has no tokens", param=param)
        return ids

    async def text(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Return the ids of a text, none for an empty one. Raises BadRequest."""
        (ids,) = await self._encode([text], "prompt", add_special_tokens=add_special_tokens)
        return ids

    async def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None,
        variables: Mapping[str, object] | None,
        *,
        body_bytes: int,
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
        if body_bytes <= 2 * self._inline_chars:
            text = template.render(messages, tools=tools, variables=variables)
        else:
            render = partial(template.render, messages, tools=tools, variables=variables)
            text = await self._executor.run(self._tenant, body_bytes, render)
        (ids,) = await self._encode([text], "messages", add_special_tokens=False)
        if not ids:
            raise BadRequest("'messages' renders to no tokens", param="messages")
        return ids

    async def _encode(
        self, texts: Sequence[str], param: str, *, add_special_tokens: bool = True
    ) -> list[tuple[int, ...]]:
        tokenizer, size = self._assets.tokenizer, sum(map(len, texts))
        if tokenizer is None:
            raise self._no_tokenizer(param)
        self._check_lengths([-(-len(text) // _MAX_TOKEN_CHARS) for text in texts], param, "at least ")

        def encode() -> list[tuple[int, ...]]:
            # `encode` holds the interpreter lock; this does not.
            encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
            self._check_lengths(list(map(len, encodings)), param)
            return [tuple(encoding.ids) for encoding in encodings]

        if size <= self._inline_chars:
            return encode()
        return await self._executor.run(self._tenant, size, encode)

    def _check_lengths(self, lengths: Sequence[int], param: str, bound: str = "") -> None:
        """Raise BadRequest for a text with more tokens than the context has room for."""
        length, generates = self._version.context_length, self._version.task is FunctionTask.GENERATE
        for index, tokens in enumerate(lengths):
            if 0 < length < tokens + generates:
                what, included = (
                    ("the prompt", ", output included") if generates else (f"{param}[{index}]", "")
                )
                raise BadRequest(
                    f"{what} has {bound}{tokens} tokens; the model's context is {length}{included}",
                    param="prompt" if generates else param,
                    code="context_length_exceeded",
                )

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
    """Return the number of tokens to generate at most, of a prompt that fits the context.

    Raises BadRequest if the context is too short.
    """
    length = version.context_length
    if length <= 0:
        return requested or default or 16
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
