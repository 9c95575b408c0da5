"""POST /functions/{name}[:version]/invoke, the endpoint of all tasks."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Scope

from gateway.api.routes_embeddings import EmbeddingRoutes
from gateway.api.routes_generate import GenerateReply, GenerateRoutes
from gateway.core.errors import Unprocessable, from_validation
from gateway.core.request_context import RequestContext, request_context
from gateway.http.limits import check_json, decode, read_body
from gateway.http.pieces import encode_array
from gateway.inference.assets import ModelAssets
from gateway.inference.images import pixels
from gateway.inference.tokenization import split_prompts
from gateway.requests.compute import Vector, top_labels
from gateway.requests.encoder_reply import EncoderAnswer, EncoderPlan, EncoderReply
from gateway.requests.handler_reply import HandlerReply
from gateway.requests.services import Services
from gateway.requests.task_inputs import require_input
from gateway.schemas.functions import (
    ClassifyRequest,
    ClassifyResponse,
    FeaturesRequest,
)
from gateway.schemas.openai import ChatRequest, CompletionRequest, EmbeddingRequest, Object
from gateway.schemas.parameters import TOP_K
from registry.messages.node import Array, Compute
from registry.records.engine import EngineKind
from registry.records.function import FunctionTask, FunctionVersion

_INLINE_BYTES = 1 << 20
_TEXT_TASKS = (FunctionTask.GENERATE, FunctionTask.EMBED)

T = TypeVar("T")


class FunctionRoutes:
    """The handler of the generic invoke."""

    def __init__(self, services: Services, generate: GenerateRoutes, embed: EmbeddingRoutes) -> None:
        self._services = services
        self._generate = generate
        self._embed = embed
        self._object = msgspec.json.Decoder(Object)
        self._classify = msgspec.json.Decoder(ClassifyRequest)
        self._features = msgspec.json.Decoder(FeaturesRequest)

    async def invoke(self, request: Request) -> ASGIApp:
        """Call a function; the body depends on its task."""
        context = request_context(request.scope)
        spec = request.path_params["function"]
        functions = self._services.functions
        version = functions.chosen(spec, context) or await functions.choose(spec, context)
        context.set_version(version)
        if not self._services.health.alive:
            self._services.health.require_alive()
        limits = self._services.settings.limits
        max_bytes = limits.text_bytes if version.task in _TEXT_TASKS else limits.body_bytes
        body = await read_body(request.scope, request.receive, limits, limit_bytes=max_bytes)
        match version.task:
            case FunctionTask.HANDLER:
                await self._large(context, body, check_json, limits, limits.handler_json)
                wanted = _accepts_events(request.scope)
                return HandlerReply(self._services, context, version, body, events_wanted=wanted)
            case FunctionTask.GENERATE | FunctionTask.EMBED:
                return await self.text_reply(context, version, spec, body)
            case FunctionTask.CLASSIFY:
                return await self._classification(context, version, request, body)
            case FunctionTask.FEATURES:
                return await self._feature_extraction(context, version, request, body)

    async def text_reply(
        self, context: RequestContext, version: FunctionVersion, spec: str, body: bytes
    ) -> GenerateReply | EncoderReply:
        """Return the response to a call of a function of texts, which is made when that is sent."""
        given = decode(body, self._object, self._services.settings.limits) | {"model": spec}
        require_input(version, given)
        if version.task is FunctionTask.EMBED:
            return await self._embed.reply(context, version, _convert(given, EmbeddingRequest))
        payload: CompletionRequest | ChatRequest
        payload = _convert(given, ChatRequest) if "messages" in given else _convert(given, CompletionRequest)
        if version.engine is not EngineKind.NATIVE:
            body = msgspec.json.encode(given)
        return await self._generate.reply(context, version, payload, body)

    async def _classification(
        self, context: RequestContext, version: FunctionVersion, request: Request, body: bytes
    ) -> ASGIApp:
        assets = await self._services.assets.get(version)
        image: str | bytes | list[object]
        if _is_image(request):
            image, top_k = body, TOP_K.read(request)
        else:
            limits = self._services.settings.limits
            payload = await self._large(context, body, decode, self._classify, limits, limits.image_json)
            image, top_k = payload.image, payload.top_k
        array = await self._pixels(context, body, image, assets)

        async def answer(vectors: Sequence[Vector], _: int) -> EncoderAnswer:
            best = top_labels(vectors[0], assets.labels, top_k)
            return EncoderAnswer(body=msgspec.json.encode(ClassifyResponse(labels=best)))

        work = Compute(request_id="", instance_id="", kind="classify", pixels=array)
        plan = EncoderPlan(context=context, version=version, works=(work,), output="logits")
        return EncoderReply(self._services, plan, answer)

    async def _feature_extraction(
        self, context: RequestContext, version: FunctionVersion, request: Request, body: bytes
    ) -> ASGIApp:
        limits = self._services.settings.limits
        assets = await self._services.assets.get(version)
        if _is_image(request):
            array = await self._pixels(context, body, body, assets)
            return self._features_reply(context, version, _image_work(array))
        payload = await self._large(context, body, decode, self._features, limits, limits.image_json)
        if payload.image is not None and payload.text is None:
            array = await self._pixels(context, body, payload.image, assets)
            return self._features_reply(context, version, _image_work(array))
        if payload.text is None or payload.image is not None:
            raise Unprocessable("give exactly one of 'text' and 'image'", param="text")
        texts = split_prompts(payload.text, param="text", limit=limits.inputs)
        ids = await self._services.encoder(version, assets, context).prompts(texts, param="text")
        work = Compute(request_id="", instance_id="", kind="text_features", token_ids=tuple(ids))
        return self._features_reply(context, version, work)

    def _features_reply(self, context: RequestContext, version: FunctionVersion, work: Compute) -> ASGIApp:
        plan = EncoderPlan(context=context, version=version, works=(work,), output="features")
        return EncoderReply(self._services, plan, _features_response)

    async def _large(
        self, context: RequestContext, body: bytes, decoder: Callable[..., T], *args: object
    ) -> T:
        """Return `decoder(body, …)`, in a thread if the body is large."""
        if len(body) <= _INLINE_BYTES:
            return decoder(body, *args)
        executor = self._services.executors.json
        return await executor.run(context.caller.tenant, len(body), decoder, body, *args)

    async def _pixels(
        self, context: RequestContext, body: bytes, image: str | bytes | list[object], assets: ModelAssets
    ) -> Array:
        executor = self._services.executors.images
        return await executor.run(context.caller.tenant, len(body), pixels, image, assets.preprocessor)


def _image_work(array: Array) -> Compute:
    return Compute(request_id="", instance_id="", kind="image_features", pixels=array)


async def _features_response(vectors: Sequence[Vector], _: int) -> EncoderAnswer:
    features = await encode_array(vector.tolist() for vector in vectors)
    return EncoderAnswer(body=msgspec.json.encode({"features": features}))


def _convert(given: Object, kind: type[T]) -> T:
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise from_validation(error) from None


def _accepts_events(scope: Scope) -> bool:
    return b"text/event-stream" in b",".join([value for name, value in scope["headers"] if name == b"accept"])


def _is_image(request: Request) -> bool:
    return request.headers.get("content-type", "").lower().startswith("image/")
