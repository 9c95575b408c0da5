"""/v1/completions and /v1/chat/completions, and the same by the generic invoke."""

from collections.abc import Sequence

import msgspec
from starlette.requests import Request

from gateway import exchange as exchanges
from gateway.assets import ModelAssets
from gateway.errors import BadRequest, Unprocessable, from_validation
from gateway.exchange import Exchange
from gateway.formats import ChatFormat, CompletionFormat, Format, ReplyOptions
from gateway.generation import Choice, make_sampling, stop_strings
from gateway.generation_reply import GenerationPlan, StreamReply, WholeReply
from gateway.ids import model_object_id
from gateway.limits import decode, read_body
from gateway.schemas_openai import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    GenerateFields,
    Object,
    refuse_unsupported,
)
from gateway.services import Services
from gateway.tokenization import Encoder, split_prompts, token_budget
from registry.function import FunctionVersion, Task

_COMPLETION_DEFAULT_TOKENS = 16

GenerateReply = StreamReply | WholeReply


class GenerateRoutes:
    """Endpoints that make text."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._completion = msgspec.json.Decoder(CompletionRequest)
        self._chat = msgspec.json.Decoder(ChatRequest)

    async def completions(self, request: Request) -> GenerateReply:
        limits = self._services.settings.limits
        body = await read_body(request.scope, request.receive, limits, limit_bytes=limits.text_bytes)
        asked = decode(body, self._completion, limits)
        exchange = exchanges.of(request.scope)
        version = await self._services.functions.resolve(asked.model, exchange.caller)
        return await self.completion_reply(exchange, version, asked)

    async def chat(self, request: Request) -> GenerateReply:
        limits = self._services.settings.limits
        body = await read_body(request.scope, request.receive, limits, limit_bytes=limits.text_bytes)
        asked = decode(body, self._chat, limits)
        exchange = exchanges.of(request.scope)
        version = await self._services.functions.resolve(asked.model, exchange.caller)
        return await self.chat_reply(exchange, version, asked)

    async def completion_reply(
        self, exchange: Exchange, version: FunctionVersion, asked: CompletionRequest
    ) -> GenerateReply:
        """The reply to a checked completion request."""
        assets = await self._prepare(exchange, version, asked)
        limits = self._services.settings.limits
        encoder = Encoder(version, assets, inline_chars=limits.inline_chars)
        prompts = [
            await encoder.prompt(prompt, param="prompt")
            for prompt in split_prompts(asked.prompt, param="prompt", limit=limits.calls)
        ]
        choices = self._choices(
            version,
            assets,
            asked,
            prompts,
            max_tokens=asked.max_tokens,
            default_tokens=_COMPLETION_DEFAULT_TOKENS,
            logprobs=asked.logprobs,
        )
        options = self._options("cmpl", exchange, assets, asked, asked.logprobs)
        return self._reply(exchange, version, assets, choices, CompletionFormat(options), asked)

    async def chat_reply(
        self, exchange: Exchange, version: FunctionVersion, asked: ChatRequest
    ) -> GenerateReply:
        """The reply to a checked chat request."""
        assets = await self._prepare(exchange, version, asked)
        limits = self._services.settings.limits
        messages = plain_messages(asked.messages, limit=limits.messages)
        tools = None if asked.tool_choice == "none" else asked.tools or None
        encoder = Encoder(version, assets, inline_chars=limits.inline_chars)
        prompt = await encoder.chat(messages, tools, asked.chat_template_kwargs)
        logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
        choices = self._choices(
            version,
            assets,
            asked,
            [prompt],
            max_tokens=asked.max_completion_tokens or asked.max_tokens,
            default_tokens=None,
            logprobs=logprobs,
        )
        options = self._options("chatcmpl", exchange, assets, asked, logprobs)
        return self._reply(exchange, version, assets, choices, ChatFormat(options), asked)

    async def _prepare(
        self, exchange: Exchange, version: FunctionVersion, asked: GenerateFields
    ) -> ModelAssets:
        exchange.concerns(version)
        if version.task is not Task.GENERATE:
            raise BadRequest(
                f"function {version.function!r} does not generate text (its task is {version.task})",
                param="model",
            )
        refuse_unsupported(asked)
        self._services.pulse.require()
        assets = await self._services.assets.get(version)
        if assets.tokenizer is None and asked.stop is not None:
            raise BadRequest(
                f"function {version.function!r} has no tokenizer: use stop_token_ids", param="stop"
            )
        return assets

    def _choices(
        self,
        version: FunctionVersion,
        assets: ModelAssets,
        asked: GenerateFields,
        prompts: Sequence[tuple[int, ...]],
        *,
        max_tokens: int | None,
        default_tokens: int | None,
        logprobs: int | None,
    ) -> list[Choice]:
        each = asked.n or 1
        limit = self._services.settings.limits.calls
        if len(prompts) * each > limit:
            raise Unprocessable(f"prompts times n may be at most {limit}", param="n")
        choices: list[Choice] = []
        for prompt in prompts:
            budget = token_budget(version, len(prompt), max_tokens, default_tokens)
            for _ in range(each):
                index = len(choices)
                sampling = make_sampling(asked, assets, max_tokens=budget, logprobs=logprobs, index=index)
                choices.append(
                    Choice(index=index, prompt_ids=prompt, sampling=sampling, stops=stop_strings(asked))
                )
        return choices

    def _options(
        self,
        prefix: str,
        exchange: Exchange,
        assets: ModelAssets,
        asked: GenerateFields,
        logprobs: int | None,
    ) -> ReplyOptions:
        return ReplyOptions(
            id=model_object_id(prefix, exchange.request_id),
            model=asked.model,
            created=int(exchange.received_at),
            tokenizer=assets.tokenizer,
            # Without a tokenizer the ids are all there is to tell.
            token_ids=bool(asked.return_token_ids) or assets.tokenizer is None,
            logprobs=logprobs,
            include_usage=_include_usage(asked),
        )

    def _reply(
        self,
        exchange: Exchange,
        version: FunctionVersion,
        assets: ModelAssets,
        choices: Sequence[Choice],
        form: Format,
        asked: GenerateFields,
    ) -> GenerateReply:
        plan = GenerationPlan(
            exchange=exchange,
            version=version,
            assets=assets,
            choices=choices,
            format=form,
            include_usage=_include_usage(asked),
        )
        return StreamReply(self._services, plan) if asked.stream else WholeReply(self._services, plan)


def _include_usage(asked: GenerateFields) -> bool:
    return bool(asked.stream_options and asked.stream_options.include_usage)


def plain_messages(given: Sequence[Object], *, limit: int) -> list[Object]:
    """The messages as templates take them: checked, with text parts joined by newlines."""
    if len(given) > limit:
        raise Unprocessable(f"messages may be at most {limit}", param="messages")
    try:
        checked = msgspec.convert(given, list[ChatMessage])
    except msgspec.ValidationError as error:
        raise from_validation(error, prefix="messages") from None
    messages: list[Object] = []
    for index, (raw, message) in enumerate(zip(given, checked, strict=True)):
        param = f"messages[{index}].content"
        content = message.content
        if content is None and message.role in ("system", "developer", "user"):
            raise Unprocessable(f"{param}: a {message.role} message needs content", param=param)
        if isinstance(content, list):
            for part in content:
                if part.type != "text":
                    raise BadRequest(f"content parts of type {part.type!r} are not supported", param=param)
            content = "\n".join(part.text or "" for part in content)
        messages.append(raw if content is raw.get("content") else {**raw, "content": content})
    return messages
