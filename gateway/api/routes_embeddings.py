"""/v1/embeddings, and its equivalent by the generic invoke."""

from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from gateway.api.bodies import read_text
from gateway.core.errors import BadRequest
from gateway.core.request_context import RequestContext, request_context
from gateway.http.limits import decode
from gateway.http.pieces import encode_array
from gateway.inference.tokenization import split_prompts
from gateway.requests.compute import Vector, as_json, shortened
from gateway.requests.encoder_reply import EncoderAnswer, EncoderPlan, EncoderReply, embed_works
from gateway.requests.services import Services
from gateway.requests.task_inputs import wrong_task
from gateway.schemas.openai import EmbeddingRequest
from registry.records.function import FunctionTask, FunctionVersion


class EmbeddingRoutes:
    """The handlers of text embeddings."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._decoder = msgspec.json.Decoder(EmbeddingRequest)

    async def embeddings(self, request: Request) -> ASGIApp:
        """Embed texts or token ids."""
        limits = self._services.settings.limits
        body = await read_text(request, limits)
        payload = decode(body, self._decoder, limits)
        context = request_context(request.scope)
        version = await self._services.functions.choose(payload.model, context)
        return await self.reply(context, version, payload)

    async def reply(
        self, context: RequestContext, version: FunctionVersion, payload: EmbeddingRequest
    ) -> EncoderReply:
        """Return the response to a validated request."""
        context.set_version(version)
        if version.task is not FunctionTask.EMBED:
            raise wrong_task(version)
        self._services.health.require_alive()
        limits = self._services.settings.limits
        assets = await self._services.assets.get(version)
        _check_dimensions(payload.dimensions, assets.config.get("hidden_size"))
        texts = split_prompts(payload.input, param="input", limit=limits.inputs)
        inputs = await self._services.encoder(version, assets, context).prompts(texts, param="input")

        async def answer(vectors: Sequence[Vector], tokens: int) -> EncoderAnswer:
            data = await encode_array(_item(i, vector, payload) for i, vector in enumerate(vectors))
            usage = {"prompt_tokens": tokens, "total_tokens": tokens}
            body = {"object": "list", "data": data, "model": payload.model, "usage": usage}
            return EncoderAnswer(body=msgspec.json.encode(body))

        works = embed_works(inputs, assets.pooling)
        plan = EncoderPlan(context=context, version=version, works=works, output="embeddings")
        return EncoderReply(self._services, plan, answer)


def _item(index: int, vector: Vector, payload: EmbeddingRequest) -> dict[str, object]:
    if payload.dimensions is not None:
        _check_dimensions(payload.dimensions, len(vector))
        vector = shortened(vector, payload.dimensions)
    embedding = as_json(vector, base64_encoded=payload.encoding_format == "base64")
    return {"object": "embedding", "index": index, "embedding": embedding}


def _check_dimensions(wanted: int | None, width: object) -> None:
    if wanted is not None and isinstance(width, int) and wanted > width:
        raise BadRequest(f"'dimensions' must be at most {width}, those of the model", param="dimensions")
