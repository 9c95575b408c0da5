"""POST /functions/{name}[:version]/invoke: one door to every kind of function."""

from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway import exchange as exchanges
from gateway.compute import Vector, rows, run_compute, top_labels
from gateway.disconnect import Attended
from gateway.errors import Unprocessable, from_validation
from gateway.exchange import Exchange
from gateway.handler_reply import HandlerReply
from gateway.images import pixels
from gateway.job import Job
from gateway.limits import check_json, decode, decode_large, read_body
from gateway.parameters import TOP_K
from gateway.responses import encoded
from gateway.routes_embeddings import EmbeddingRoutes
from gateway.routes_generate import GenerateRoutes
from gateway.schemas_functions import (
    ClassifyRequest,
    ClassifyResponse,
    FeaturesRequest,
    FeaturesResponse,
)
from gateway.schemas_openai import ChatRequest, CompletionRequest, EmbeddingRequest, Object
from gateway.services import Services
from gateway.tokenization import Encoder, split_prompts
from registry.function import FunctionVersion, Task
from registry.messages import Array, Compute

_TEXT_TASKS = (Task.GENERATE, Task.EMBED)

T = TypeVar("T")
Kind = Literal["classify", "text_features", "image_features"]
Shape = Callable[[Sequence[Vector]], msgspec.Struct]


class FunctionRoutes:
    """The generic invoke."""

    def __init__(self, services: Services, generate: GenerateRoutes, embed: EmbeddingRoutes) -> None:
        self._services = services
        self._generate = generate
        self._embed = embed
        self._object = msgspec.json.Decoder(Object)
        self._classify = msgspec.json.Decoder(ClassifyRequest)
        self._features = msgspec.json.Decoder(FeaturesRequest)

    async def invoke(self, request: Request) -> ASGIApp:
        exchange = exchanges.of(request.scope)
        spec = request.path_params["function"]
        version = await self._services.functions.resolve(spec, exchange.caller)
        exchange.concerns(version)
        self._services.pulse.require()
        limits = self._services.settings.limits
        most = limits.text_bytes if version.task in _TEXT_TASKS else limits.body_bytes
        body = await read_body(request.scope, request.receive, limits, limit_bytes=most)
        match version.task:
            case Task.GENERATE:
                return await self._generation(exchange, version, spec, body)
            case Task.EMBED:
                given = decode(body, self._object, limits) | {"model": spec}
                return await self._embed.reply(exchange, version, _convert(given, EmbeddingRequest))
            case Task.CLASSIFY:
                return await self._classification(exchange, version, request, body)
            case Task.FEATURES:
                return await self._feature_extraction(exchange, version, request, body)
            case Task.HANDLER:
                await check_json(body, limits, limits.handler_json)
                wanted = "text/event-stream" in request.headers.get("accept", "")
                return HandlerReply(self._services, exchange, version, body, events_wanted=wanted)

    async def _generation(
        self, exchange: Exchange, version: FunctionVersion, spec: str, body: bytes
    ) -> ASGIApp:
        given = decode(body, self._object, self._services.settings.limits) | {"model": spec}
        if "messages" in given:
            return await self._generate.chat_reply(exchange, version, _convert(given, ChatRequest))
        return await self._generate.completion_reply(exchange, version, _convert(given, CompletionRequest))

    async def _classification(
        self, exchange: Exchange, version: FunctionVersion, request: Request, body: bytes
    ) -> ASGIApp:
        assets = await self._services.assets.get(version)
        image: str | bytes | list[object]
        if _is_image(request):
            image, top_k = body, TOP_K.read(request)
        else:
            limits = self._services.settings.limits
            asked = await decode_large(body, self._classify, limits, limits.image_json)
            image, top_k = asked.image, asked.top_k
        array = await pixels(image, assets.preprocessor)

        def shape(vectors: Sequence[Vector]) -> ClassifyResponse:
            best = top_labels(vectors[0], assets.labels, top_k)
            return ClassifyResponse(labels=best)

        return EncoderReply(
            self._services, exchange, version, "classify", pixels=array, output="logits", shape=shape
        )

    async def _feature_extraction(
        self, exchange: Exchange, version: FunctionVersion, request: Request, body: bytes
    ) -> ASGIApp:
        limits = self._services.settings.limits
        assets = await self._services.assets.get(version)
        if _is_image(request):
            array = await pixels(body, assets.preprocessor)
            return EncoderReply(self._services, exchange, version, "image_features", pixels=array)
        asked = await decode_large(body, self._features, limits, limits.image_json)
        if asked.image is not None and asked.text is None:
            array = await pixels(asked.image, assets.preprocessor)
            return EncoderReply(self._services, exchange, version, "image_features", pixels=array)
        if asked.text is None or asked.image is not None:
            raise Unprocessable("give exactly one of text and image", param="text")
        encoder = Encoder(version, assets, inline_chars=limits.inline_chars)
        texts = split_prompts(asked.text, param="text", limit=limits.inputs)
        ids = tuple([await encoder.prompt(text, param="text") for text in texts])
        return EncoderReply(self._services, exchange, version, "text_features", token_ids=ids)


def _features_response(vectors: Sequence[Vector]) -> FeaturesResponse:
    return FeaturesResponse(features=[vector.tolist() for vector in vectors])


class EncoderReply:
    """One forward of an encoder, answered as JSON."""

    def __init__(
        self,
        services: Services,
        exchange: Exchange,
        version: FunctionVersion,
        kind: Kind,
        *,
        pixels: Array | None = None,
        token_ids: tuple[tuple[int, ...], ...] = (),
        output: str = "features",
        shape: Shape = _features_response,
    ) -> None:
        self._services = services
        self._exchange = exchange
        self._version = version
        self._kind = kind
        self._pixels = pixels
        self._token_ids = token_ids
        self._output = output
        self._shape = shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with Attended(receive) as attended:
            async with Job(self._services, self._exchange, self._version) as job:
                work = Compute(
                    request_id=job.next_call_id(),
                    instance_id="",
                    kind=self._kind,
                    pixels=self._pixels,
                    token_ids=self._token_ids,
                )
                answer = self._shape(rows(await run_compute(job, work), self._output))
                await job.settle()
            attended.finish()
            await encoded(answer, headers=job.headers(final=True))(scope, receive, send)


def _convert(given: Object, kind: type[T]) -> T:
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise from_validation(error) from None


def _is_image(request: Request) -> bool:
    return request.headers.get("content-type", "").lower().startswith("image/")
