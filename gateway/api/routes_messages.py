"""/v1/messages: Anthropic's Messages API, by translation to a chat."""

import msgspec
from starlette.requests import Request

from gateway.api.bodies import read_text
from gateway.api.routes_generate import GenerateReply, GenerateRoutes
from gateway.api.routes_tokens import TokenRoutes
from gateway.core.request_context import request_context
from gateway.http.limits import decode
from gateway.requests.messages_format import MESSAGES
from gateway.requests.messages_input import chat_of_messages, prompt_of_messages
from gateway.requests.services import Services
from gateway.schemas.anthropic import CountTokensRequest, MessagesRequest, TokenTotal
from gateway.schemas.openai import refuse_misspelt


class MessageRoutes:
    """The handlers of messages."""

    def __init__(self, services: Services, generate: GenerateRoutes, tokens: TokenRoutes) -> None:
        self._services = services
        self._generate = generate
        self._tokens = tokens
        self._messages = msgspec.json.Decoder(MessagesRequest)
        self._count = msgspec.json.Decoder(CountTokensRequest)

    async def messages(self, request: Request) -> GenerateReply:
        """Continue a conversation."""
        limits = self._services.settings.limits
        body = await read_text(request, limits)
        payload = decode(body, self._messages, limits)
        refuse_misspelt(body, MessagesRequest)
        context = request_context(request.scope)
        return await self._generate.translated(context, chat_of_messages(payload), MESSAGES)

    async def count(self, request: Request) -> TokenTotal:
        """Return the number of tokens of a conversation."""
        limits = self._services.settings.limits
        body = await read_text(request, limits)
        payload = decode(body, self._count, limits)
        chat = prompt_of_messages(payload)
        ids = await self._tokens.of_chat(request_context(request.scope), chat, body_bytes=len(body))
        return TokenTotal(input_tokens=len(ids))
