"""/tokenize and /detokenize: what a function's tokenizer makes of texts, without a call of the function."""

import msgspec
from starlette.requests import Request

from gateway.api.bodies import read_text
from gateway.api.routes_generate import plain_messages
from gateway.core.errors import BadRequest, Unprocessable, from_validation
from gateway.core.request_context import RequestContext, request_context
from gateway.http.limits import decode
from gateway.inference.assets import ModelAssets
from gateway.requests.reply_format import Json
from gateway.requests.services import Services
from gateway.requests.task_inputs import wrong_task
from gateway.schemas.openai import ChatRequest
from gateway.schemas.tokens import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from registry.images.adapters import split_adapter
from registry.records.function import FunctionTask, FunctionVersion

_CHAT_FIELDS = ("tools", "chat_template_kwargs")


class TokenRoutes:
    """The handlers of tokens."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._tokenize = msgspec.json.Decoder(TokenizeRequest)
        self._detokenize = msgspec.json.Decoder(DetokenizeRequest)

    async def tokenize(self, request: Request) -> TokenizeResponse:
        """Return the tokens of a text or a chat."""
        limits = self._services.settings.limits
        body = await read_text(request, limits)
        payload = decode(body, self._tokenize, limits)
        context = request_context(request.scope)
        version, assets = await self._resolved(context, payload.model)
        if (payload.prompt is None) == (payload.messages is None):
            raise Unprocessable("give exactly one of 'prompt' and 'messages'", param="prompt")
        if payload.messages is not None:
            chat: Json = {"model": payload.model, "messages": payload.messages}
            chat |= {name: given for name in _CHAT_FIELDS if (given := getattr(payload, name)) is not None}
            ids = await self.of_chat(context, chat, body_bytes=len(body))
        else:
            encoder = self._services.encoder(version, assets, context)
            ids = await encoder.text(
                payload.prompt or "", add_special_tokens=payload.add_special_tokens is not False
            )
        names = None
        if payload.return_token_strs:
            names = await self._services.executors.text.run(
                context.caller.tenant, len(ids), _names, ids, assets
            )
        return TokenizeResponse(
            count=len(ids), max_model_len=version.context_length or None, tokens=list(ids), token_strs=names
        )

    async def detokenize(self, request: Request) -> DetokenizeResponse:
        """Return the text of tokens."""
        limits = self._services.settings.limits
        body = await read_text(request, limits)
        payload = decode(body, self._detokenize, limits)
        context = request_context(request.scope)
        _, assets = await self._resolved(context, payload.model)
        tokens, executor = payload.tokens, self._services.executors.text
        text = await executor.run(context.caller.tenant, len(tokens), _text, tokens, assets)
        return DetokenizeResponse(prompt=text)

    async def of_chat(self, context: RequestContext, chat: Json, *, body_bytes: int) -> tuple[int, ...]:
        """Return the prompt's tokens of a chat's body, which came in one of that size."""
        try:
            payload = msgspec.convert(chat, ChatRequest)
        except msgspec.ValidationError as error:
            raise from_validation(error) from None
        version, assets = await self._resolved(context, payload.model)
        if version.task is not FunctionTask.GENERATE:
            raise wrong_task(version)
        messages = plain_messages(payload.messages, limit=self._services.settings.limits.messages)
        tools = None if payload.tool_choice == "none" else payload.tools or None
        encoder = self._services.encoder(version, assets, context)
        return await encoder.chat(messages, tools, payload.chat_template_kwargs, body_bytes=body_bytes)

    async def _resolved(self, context: RequestContext, model: str) -> tuple[FunctionVersion, ModelAssets]:
        name, _ = split_adapter(model)
        version = await self._services.functions.resolve(name, context.caller)
        assets = await self._services.assets.get(version)
        if assets.tokenizer is None:
            raise _no_tokenizer(version)
        return version, assets


def _no_tokenizer(version: FunctionVersion) -> BadRequest:
    return BadRequest(f"function {version.function!r} has no tokenizer", param="model")


def _text(ids: list[int], assets: ModelAssets) -> str:
    assert assets.tokenizer is not None
    # `decode` holds the interpreter lock; this does not.
    (text,) = assets.tokenizer.decode_batch([ids], skip_special_tokens=False)
    return text


def _names(ids: tuple[int, ...], assets: ModelAssets) -> list[str]:
    """Return the tokens as the vocabulary has them."""
    tokenizer = assets.tokenizer
    assert tokenizer is not None
    return [tokenizer.id_to_token(token) or "" for token in ids]
