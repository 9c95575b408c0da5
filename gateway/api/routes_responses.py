"""/v1/responses: OpenAI's Responses API, by translation to a chat. Nothing is stored."""

import msgspec
from starlette.requests import Request

from gateway.api.bodies import read_text
from gateway.api.routes_generate import GenerateReply, GenerateRoutes
from gateway.core.request_context import request_context
from gateway.http.limits import decode
from gateway.requests.responses_format import responses_form
from gateway.requests.responses_input import chat_of_response
from gateway.requests.services import Services
from gateway.schemas.openai import refuse_misspelt
from gateway.schemas.responses import ResponsesRequest


class ResponseRoutes:
    """The handler of responses."""

    def __init__(self, services: Services, generate: GenerateRoutes) -> None:
        self._services = services
        self._generate = generate
        self._decoder = msgspec.json.Decoder(ResponsesRequest)

    async def responses(self, request: Request) -> GenerateReply:
        """Continue a conversation."""
        limits = self._services.settings.limits
        body = await read_text(request, limits)
        payload = decode(body, self._decoder, limits)
        refuse_misspelt(body, ResponsesRequest)
        context, form = request_context(request.scope), responses_form(payload)
        return await self._generate.translated(context, chat_of_response(payload), form)
