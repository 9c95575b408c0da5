"""/v1/completions and /v1/chat/completions, and their equivalents by the generic invoke."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, TypeVar

import msgspec
from starlette.requests import Request

from gateway.api.bodies import read_text
from gateway.core.errors import ApiError, BadRequest, Unprocessable, from_validation
from gateway.core.ids import model_object_id
from gateway.core.request_context import RequestContext, request_context
from gateway.http.limits import decode
from gateway.inference.assets import ModelAssets
from gateway.inference.tokenization import Prompt, split_prompts, token_budget
from gateway.inference.tool_calls import ToolForm
from gateway.requests.formats import CHAT, COMPLETIONS
from gateway.requests.forwarded_chat import Relay, Translated, Verbatim
from gateway.requests.forwarded_reply import ForwardedReply
from gateway.requests.forwarding import plan_forward, runs_by_tokens, sampling_defaults, with_defaults
from gateway.requests.generation import GenerationChoice, bad_word_ids, make_sampling, stop_strings
from gateway.requests.generation_reply import GenerationPlan, StreamReply, WholeReply
from gateway.requests.grammar import TextGrammar, TextRules, requested_grammar
from gateway.requests.reply_format import ReplyForm, ReplyOptions
from gateway.requests.services import Services
from gateway.requests.task_inputs import wrong_task
from gateway.requests.tool_choice import is_forced, tools_of
from gateway.schemas.openai import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    GenerateFields,
    Object,
    refuse_misspelt,
    refuse_unsupported,
)
from registry.images.adapters import split_adapter
from registry.messages.forward import ForwardPath
from registry.records.engine import EngineKind
from registry.records.function import FunctionTask, FunctionVersion

_COMPLETION_DEFAULT_TOKENS = 16
_Payload = TypeVar("_Payload", CompletionRequest, ChatRequest)

GenerateReply = StreamReply | WholeReply | ForwardedReply


class _Addressed(msgspec.Struct, frozen=True, kw_only=True):
    """What a body names, whatever else is in it."""

    model: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]


class GenerateRoutes:
    """The handlers of text generation."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._completion = msgspec.json.Decoder(CompletionRequest)
        self._chat = msgspec.json.Decoder(ChatRequest)
        self._addressed = msgspec.json.Decoder(_Addressed)

    async def completions(self, request: Request) -> GenerateReply:
        """Continue a prompt."""
        return await self._serve(request, self._completion, CompletionRequest)

    async def chat(self, request: Request) -> GenerateReply:
        """Continue a conversation."""
        return await self._serve(request, self._chat, ChatRequest)

    async def _serve(
        self, request: Request, decoder: msgspec.json.Decoder[_Payload], kind: type[_Payload]
    ) -> GenerateReply:
        limits = self._services.settings.limits
        body = await read_text(request, limits)
        context = request_context(request.scope)
        try:
            payload = decode(body, decoder, limits)
        except Unprocessable:
            version = await self._foreign_version(body, context)
            if version is None:
                raise
            return await self._forwarded(context, version, body, kind)
        name, adapter = split_adapter(payload.model)
        version = await self._services.functions.choose(name, context)
        if adapter:
            return await self._forwarded(context, version, body, kind)
        if version.engine is EngineKind.NATIVE:
            refuse_misspelt(body, kind)
        return await self.reply(context, version, payload, body)

    async def translated(self, context: RequestContext, chat: Object, form: ReplyForm) -> GenerateReply:
        """Return the response, in another protocol's form, to its request as the body of a chat."""
        try:
            payload = msgspec.convert(chat, ChatRequest)
        except msgspec.ValidationError as error:
            raise from_validation(error) from None
        name, adapter = split_adapter(payload.model)
        version = await self._services.functions.resolve(name, context.caller)
        body = msgspec.json.encode(chat)
        if adapter:
            return await self._forwarded(context, version, body, ChatRequest, form)
        return await self.reply(context, version, payload, body, form)

    async def reply(
        self,
        context: RequestContext,
        version: FunctionVersion,
        payload: CompletionRequest | ChatRequest,
        body: bytes,
        form: ReplyForm | None = None,
    ) -> GenerateReply:
        """Return the response to the validated request of a body, by what runs the version.

        It has the form of its own endpoint unless one is given.
        """
        if version.engine is not EngineKind.NATIVE:
            assets = await self._services.assets.get(version)
            fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
            defaults = sampling_defaults(assets.generation, version.engine_args)
            by_tokens = runs_by_tokens(payload, fields, has_tokenizer=assets.tokenizer is not None)
            if defaults is None or not by_tokens:
                return await self._forwarded(context, version, body, type(payload), form)
            payload = with_defaults(payload, defaults)
        if isinstance(payload, ChatRequest):
            return await self._chat_reply(context, version, payload, form or CHAT, body_bytes=len(body))
        return await self._completion_reply(context, version, payload)

    async def _foreign_version(self, body: bytes, context: RequestContext) -> FunctionVersion | None:
        """Return the version that a body names, if another engine runs it: its server validates the body."""
        try:
            addressed = decode(body, self._addressed, self._services.settings.limits)
            name, _ = split_adapter(addressed.model)
            version = await self._services.functions.choose(name, context)
        except ApiError:
            return None
        return None if version.engine is EngineKind.NATIVE else version

    async def _forwarded(
        self,
        context: RequestContext,
        version: FunctionVersion,
        body: bytes,
        kind: type[CompletionRequest | ChatRequest],
        form: ReplyForm | None = None,
    ) -> ForwardedReply:
        context.set_version(version)
        self._services.health.require_alive()
        limits = self._services.settings.limits
        plan = await asyncio.to_thread(plan_forward, body, version, context.caller.tenant, limits)
        path: ForwardPath = "/v1/chat/completions" if kind is ChatRequest else "/v1/completions"
        relay: Relay = Verbatim()
        if form is not None:
            options = ReplyOptions(
                id=model_object_id(form.prefix, context.request_id),
                model=self._addressed.decode(body).model,
                created=int(context.received_at),
                token_text=str,
                token_ids=False,
                logprobs=None,
                include_usage=False,
            )
            relay = Translated(form.make(options))
        return ForwardedReply(self._services, context, version, path, plan, relay)

    async def _completion_reply(
        self, context: RequestContext, version: FunctionVersion, payload: CompletionRequest
    ) -> GenerateReply:
        """Return the response to a validated completion request."""
        assets = await self._prepare(context, version, payload)
        limit = self._services.settings.limits.calls
        given = split_prompts(payload.prompt, param="prompt", limit=limit)
        if len(given) * (payload.n or 1) > limit:
            raise Unprocessable(f"the number of prompts times n must be at most {limit}", param="n")
        prompts = await self._services.encoder(version, assets, context).prompts(given, param="prompt")
        choices = self._choices(
            version,
            assets,
            payload,
            prompts,
            max_tokens=payload.max_tokens,
            default_tokens=_COMPLETION_DEFAULT_TOKENS,
            logprobs=payload.logprobs,
            rules=await _rules(payload, version, assets),
        )
        if payload.echo:
            texts = await asyncio.to_thread(_texts, given, assets)
            each = payload.n or 1
            choices = [replace(choice, echo=texts[choice.index // each]) for choice in choices]
        return self._reply(context, version, assets, choices, COMPLETIONS, payload, payload.logprobs)

    async def _chat_reply(
        self,
        context: RequestContext,
        version: FunctionVersion,
        payload: ChatRequest,
        form: ReplyForm,
        *,
        body_bytes: int,
    ) -> GenerateReply:
        """Return the response to a validated chat request, of a body of that size."""
        assets = await self._prepare(context, version, payload)
        limits = self._services.settings.limits
        messages = plain_messages(payload.messages, limit=limits.messages)
        tools = None if payload.tool_choice == "none" else payload.tools or None
        encoder = self._services.encoder(version, assets, context)
        prompt = await encoder.chat(messages, tools, payload.chat_template_kwargs, body_bytes=body_bytes)
        logprobs = (payload.top_logprobs or 0) if payload.logprobs else None
        choices = self._choices(
            version,
            assets,
            payload,
            [prompt],
            max_tokens=payload.max_completion_tokens or payload.max_tokens,
            default_tokens=None,
            logprobs=logprobs,
            rules=await _rules(payload, version, assets),
        )
        if names := frozenset(tools_of(payload)):
            tool_form = tool_form_of(payload, assets)
            choices = [replace(choice, tools=names, tool_form=tool_form) for choice in choices]
        return self._reply(context, version, assets, choices, form, payload, logprobs)

    async def _prepare(
        self, context: RequestContext, version: FunctionVersion, payload: GenerateFields
    ) -> ModelAssets:
        context.set_version(version)
        if version.task is not FunctionTask.GENERATE:
            raise wrong_task(version)
        refuse_unsupported(payload)
        self._services.health.require_alive()
        assets = await self._services.assets.get(version)
        if assets.tokenizer is None and payload.stop is not None:
            raise BadRequest(
                f"function {version.function!r} has no tokenizer: give stop_token_ids instead of stop",
                param="stop",
            )
        return assets

    def _choices(
        self,
        version: FunctionVersion,
        assets: ModelAssets,
        payload: GenerateFields,
        prompts: Sequence[tuple[int, ...]],
        *,
        max_tokens: int | None,
        default_tokens: int | None,
        logprobs: int | None,
        rules: TextRules,
    ) -> list[GenerationChoice]:
        each = payload.n or 1
        choices: list[GenerationChoice] = []
        most = self._services.settings.limits.logprobs // (len(prompts) * each * (1 + (logprobs or 0)))
        bounded = logprobs is not None and not payload.stream
        if bounded and max_tokens is not None and max_tokens > most:
            raise BadRequest(
                f"with {len(prompts) * each} choices and {logprobs} logprobs a token, a response that is not "
                f"streamed has at most {most} tokens a choice: lower one of them, or stream it",
                param="max_tokens",
            )
        for prompt in prompts:
            budget = token_budget(version, len(prompt), max_tokens, default_tokens)
            budget = min(budget, most) if bounded else budget
            for _ in range(each):
                index = len(choices)
                sampling = make_sampling(
                    payload,
                    assets,
                    max_tokens=budget,
                    logprobs=logprobs,
                    index=index,
                    rules=rules,
                )
                choices.append(
                    GenerationChoice(
                        index=index, prompt_ids=prompt, sampling=sampling, stops=stop_strings(payload)
                    )
                )
        return choices

    def _reply(
        self,
        context: RequestContext,
        version: FunctionVersion,
        assets: ModelAssets,
        choices: Sequence[GenerationChoice],
        form: ReplyForm,
        payload: GenerateFields,
        logprobs: int | None,
    ) -> GenerateReply:
        options = ReplyOptions(
            id=model_object_id(form.prefix, context.request_id),
            model=payload.model,
            created=int(context.received_at),
            token_text=assets.token_text,
            # Without a tokenizer the ids are the only output.
            token_ids=bool(payload.return_token_ids) or assets.tokenizer is None,
            logprobs=logprobs,
            include_usage=_include_usage(payload),
            prompt_tokens=len(choices[0].prompt_ids),
        )
        plan = GenerationPlan(
            context=context,
            version=version,
            assets=assets,
            choices=choices,
            format=form.make(options),
        )
        return StreamReply(self._services, plan) if payload.stream else WholeReply(self._services, plan)


def _include_usage(payload: GenerateFields) -> bool:
    return bool(payload.stream_options and payload.stream_options.include_usage)


async def _grammar(
    payload: GenerateFields, version: FunctionVersion, assets: ModelAssets
) -> TextGrammar | None:
    """Return the grammar of the request's text, None without one. Raises BadRequest."""
    grammar = await asyncio.to_thread(requested_grammar, payload)
    if not grammar:
        return None
    if assets.tokenizer is None or not assets.eos_token_ids:
        raise BadRequest(
            f"function {version.function!r} has no tokenizer or no end token: its texts follow no grammar"
        )
    if payload.ignore_eos:
        raise BadRequest("ignore_eos and a grammar exclude each other: it ends the text", param="ignore_eos")
    return TextGrammar(grammar=grammar, tokenizer=version.assets["tokenizer.json"])


async def _rules(payload: GenerateFields, version: FunctionVersion, assets: ModelAssets) -> TextRules:
    """Return what the request's text must and must not have. Raises BadRequest."""
    grammar = await _grammar(payload, version, assets)
    if not payload.bad_words:
        return TextRules(grammar=grammar)
    if assets.tokenizer is None:
        raise BadRequest("bad_words need a function with a tokenizer", param="bad_words")
    words = await asyncio.to_thread(bad_word_ids, payload.bad_words, assets.tokenizer)
    return TextRules(grammar=grammar, bad_words=words)


def tool_form_of(payload: ChatRequest, assets: ModelAssets) -> ToolForm | None:
    """Return how a text has calls: as the template teaches, or by the grammar of a forced call."""
    if is_forced(payload):
        return ToolForm.WHOLE
    template = assets.tool_template or assets.template
    return None if template is None else template.tool_form


def _texts(prompts: Sequence[Prompt], assets: ModelAssets) -> list[str]:
    """Return the prompts as texts. Raises BadRequest for token ids without a tokenizer."""
    tokenizer = assets.tokenizer

    def text(prompt: Prompt) -> str:
        if isinstance(prompt, str):
            return prompt
        if tokenizer is None:
            raise BadRequest("echo of token ids needs a function with a tokenizer", param="echo")
        return tokenizer.decode(prompt, skip_special_tokens=False)

    return [text(prompt) for prompt in prompts]


def plain_messages(given: Sequence[Object], *, limit: int) -> list[Object]:
    """Return the messages for the template: validated, with text parts joined by newlines."""
    if len(given) > limit:
        raise Unprocessable(f"at most {limit} messages are allowed", param="messages")
    try:
        checked = msgspec.convert(given, list[ChatMessage])
    except msgspec.ValidationError as error:
        raise from_validation(error, prefix="messages") from None
    messages: list[Object] = []
    for index, (raw, message) in enumerate(zip(given, checked, strict=True)):
        param = f"messages[{index}].content"
        content = message.content
        if content is None and message.role in ("system", "developer", "user"):
            raise Unprocessable(f"'{param}' is required for a {message.role} message", param=param)
        if isinstance(content, list):
            for part in content:
                if part.type != "text":
                    raise BadRequest(
                        f"content parts of type {part.type!r} are not supported: only 'text'", param=param
                    )
            content = "\n".join(part.text or "" for part in content)
        messages.append(raw if content is raw.get("content") else {**raw, "content": content})
    return messages
