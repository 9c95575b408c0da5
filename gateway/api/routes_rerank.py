"""/v1/rerank: documents by how near an encoder's vectors of them are to that of a query."""

import math
import operator
from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from gateway.api.bodies import read_text
from gateway.core.errors import Unprocessable
from gateway.core.ids import model_object_id
from gateway.core.request_context import request_context
from gateway.http.limits import decode
from gateway.http.pieces import TimeSlice
from gateway.requests.compute import Vector
from gateway.requests.encoder_reply import EncoderAnswer, EncoderPlan, EncoderReply, embed_works
from gateway.requests.services import Services
from gateway.requests.task_inputs import wrong_task
from gateway.schemas.openai import UsageInfo
from gateway.schemas.rerank import RerankRequest, RerankResponse, RerankResult, RerankText
from registry.records.function import FunctionTask


class RerankRoutes:
    """The handler of rerank."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._decoder = msgspec.json.Decoder(RerankRequest)

    async def rerank(self, request: Request) -> ASGIApp:
        """Sort documents by their relevance to a query."""
        limits = self._services.settings.limits
        body = await read_text(request, limits)
        payload = decode(body, self._decoder, limits)
        context = request_context(request.scope)
        version = await self._services.functions.resolve(payload.model, context.caller)
        context.set_version(version)
        if version.task is not FunctionTask.EMBED:
            raise wrong_task(version)
        self._services.health.require_alive()
        if len(payload.documents) >= limits.inputs:
            raise Unprocessable(f"'documents' must have at most {limits.inputs - 1} items", param="documents")
        texts = [one if isinstance(one, str) else one.text for one in payload.documents]
        assets = await self._services.assets.get(version)
        encoder = self._services.encoder(version, assets, context)
        inputs = await encoder.prompts([payload.query, *texts], param="documents")

        async def answer(vectors: Sequence[Vector], tokens: int) -> EncoderAnswer:
            response = RerankResponse(
                id=model_object_id("rerank", context.request_id),
                model=payload.model,
                results=await _results(payload, texts, vectors),
                usage=UsageInfo(prompt_tokens=tokens, total_tokens=tokens),
            )
            return EncoderAnswer(body=msgspec.json.encode(response))

        works = embed_works(inputs, assets.pooling)
        plan = EncoderPlan(context=context, version=version, works=works, output="embeddings")
        return EncoderReply(self._services, plan, answer)


async def _results(
    payload: RerankRequest, texts: Sequence[str], vectors: Sequence[Vector]
) -> list[RerankResult]:
    """Return the best documents; in time slices, as there may be thousands."""
    query, time_slice, scores = vectors[0], TimeSlice(), list[float]()
    for vector in vectors[1:]:
        scores.append(_cosine(query, vector))
        await time_slice.pause()
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: payload.top_n or len(scores)]
    shown = payload.return_documents is not False
    return [
        RerankResult(
            index=index,
            relevance_score=scores[index],
            document=RerankText(text=texts[index]) if shown else None,
        )
        for index in best
    ]


def _cosine(one: Vector, other: Vector) -> float:
    norms = math.sqrt(_dot(one, one) * _dot(other, other))
    return _dot(one, other) / norms if norms else 0.0


def _dot(one: Vector, other: Vector) -> float:
    return sum(map(operator.mul, one, other))
