"""/v2: the Open Inference Protocol, for functions that do not generate."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from gateway.api.routes_system import SystemRoutes
from gateway.core.errors import BadRequest, Unavailable
from gateway.core.request_context import RequestContext, request_context
from gateway.http.limits import read_body
from gateway.http.responses import json_response
from gateway.inference.assets import ModelAssets
from gateway.inference.images import pixels
from gateway.inference.tokenization import Prompt
from gateway.requests.compute import Vector
from gateway.requests.encoder_reply import EncoderAnswer, EncoderPlan, EncoderReply, embed_works
from gateway.requests.services import Services
from gateway.requests.task_inputs import wrong_task
from gateway.requests.tensors import (
    HEADER_LENGTH,
    Inference,
    byte_strings,
    encode_response,
    parse_inference,
    pixel_array,
    texts,
    token_ids,
)
from gateway.schemas.open_inference import (
    InferResponse,
    ModelMetadata,
    ModelReady,
    ServerLive,
    ServerMetadata,
    ServerReady,
    TensorMetadata,
)
from registry.messages.node import Array, Compute
from registry.records.function import FunctionTask, FunctionVersion

_INLINE_BYTES = 64 << 10
_BINARY = b"application/octet-stream"
_TEXTS = (
    TensorMetadata(name="text", datatype="BYTES", shape=(-1,)),
    TensorMetadata(name="input_ids", datatype="INT64", shape=(-1, -1)),
    TensorMetadata(name="attention_mask", datatype="INT64", shape=(-1, -1)),
)
_IMAGES = (
    TensorMetadata(name="pixel_values", datatype="FP32", shape=(-1, 3, -1, -1)),
    TensorMetadata(name="image", datatype="BYTES", shape=(1,)),
)
_INPUTS: Mapping[FunctionTask, Sequence[TensorMetadata]] = {
    FunctionTask.EMBED: _TEXTS,
    FunctionTask.CLASSIFY: _IMAGES,
    FunctionTask.FEATURES: (*_TEXTS, *_IMAGES),
}
_OUTPUTS = {
    FunctionTask.EMBED: "embeddings",
    FunctionTask.CLASSIFY: "logits",
    FunctionTask.FEATURES: "features",
}
_MASK = "attention_mask"

T = TypeVar("T")


class InferenceRoutes:
    """The handlers of the Open Inference Protocol."""

    def __init__(self, services: Services, system: SystemRoutes) -> None:
        self._services = services
        self._system = system

    async def server(self, request: Request) -> ServerMetadata:
        """Describe the server."""
        return ServerMetadata()

    async def live(self, request: Request) -> ServerLive:
        """Return 200 while the process responds."""
        return ServerLive(live=True)

    async def ready(self, request: Request) -> Response:
        """Return 200 while this gateway accepts requests, else 503."""
        is_ready = not self._system.reasons()
        return json_response(ServerReady(ready=is_ready), status=200 if is_ready else 503)

    async def model_ready(self, request: Request) -> ModelReady:
        """Return that a call of the function would be served; it would start one that is scaled to zero."""
        await self._resolved(request)
        if reasons := self._system.reasons():
            raise Unavailable("; ".join(reasons), code="not_ready")
        return ModelReady(name=request.path_params["model"], ready=True)

    async def model(self, request: Request) -> ModelMetadata:
        """Describe a function."""
        version = await self._resolved(request)
        assets = await self._services.assets.get(version)
        output = TensorMetadata(
            name=_output(version), datatype="FP32", shape=(-1, _width(version, assets) or -1)
        )
        view = self._services.cluster.view()
        numbers = sorted(one.version for one in view.versions if one.function == version.function)
        return ModelMetadata(
            name=version.function,
            versions=[str(number) for number in numbers or (version.version,)],
            platform="hypercast",
            inputs=_INPUTS[version.task],
            outputs=(output,),
        )

    async def infer(self, request: Request) -> ASGIApp:
        """Run a function's encoder on tensors."""
        context, limits = request_context(request.scope), self._services.settings.limits
        version = await self._resolved(request)
        context.set_version(version)
        output = _output(version)
        self._services.health.require_alive()
        if request.headers.get("content-encoding", "identity") != "identity":
            raise BadRequest("a compressed body is not supported")
        header = request.headers.get(HEADER_LENGTH.decode())
        length = None if header is None else header.encode("latin-1")
        body = await read_body(request.scope, request.receive, limits)
        inference = await self._large(context, len(body), lambda: parse_inference(body, length, limits))
        binary = inference.is_binary(output)
        assets = await self._services.assets.get(version)
        works = await self._works(context, version, assets, inference, len(body))
        described = InferResponse(
            model_name=version.function,
            model_version=str(version.version),
            id=inference.request.id,
            outputs=(),
        )

        async def answer(vectors: Sequence[Vector], _: int) -> EncoderAnswer:
            data, json_bytes = await encode_response(described, output, vectors, binary=binary)
            if json_bytes is None:
                return EncoderAnswer(body=data)
            headers = ((HEADER_LENGTH, b"%d" % json_bytes),)
            return EncoderAnswer(body=data, headers=headers, media_type=_BINARY)

        plan = EncoderPlan(context=context, version=version, works=works, output=output)
        return EncoderReply(self._services, plan, answer)

    async def _resolved(self, request: Request) -> FunctionVersion:
        parts, context = request.path_params, request_context(request.scope)
        spec = ":".join([parts["model"], *([parts["version"]] if "version" in parts else [])])
        return await self._services.functions.resolve(spec, context.caller)

    async def _works(
        self,
        context: RequestContext,
        version: FunctionVersion,
        assets: ModelAssets,
        inference: Inference,
        nbytes: int,
    ) -> Sequence[Compute]:
        """Return the forward passes of a request's tensors. Raises BadRequest."""
        tensors, limit = inference.tensors, self._services.settings.limits.inputs
        name, known = _chosen(version, tensors), version.task
        match name:
            case "pixel_values":
                array = await self._large(context, nbytes, lambda: pixel_array(tensors[name], limit))
                return (_image_work(known, array),)
            case "image":
                (file,) = byte_strings(tensors[name], 1)
                executor = self._services.executors.images
                array = await executor.run(context.caller.tenant, nbytes, pixels, file, assets.preprocessor)
                return (_image_work(known, array),)
        prompts: Sequence[Prompt]
        if name == "text":
            prompts = await self._large(context, nbytes, lambda: texts(tensors[name], limit))
        else:
            mask = tensors.get(_MASK)
            prompts = await self._large(context, nbytes, lambda: token_ids(tensors[name], mask, limit))
        ids = await self._services.encoder(version, assets, context).prompts(prompts, param=name)
        if known is FunctionTask.EMBED:
            return embed_works(ids, assets.pooling)
        return (Compute(request_id="", instance_id="", kind="text_features", token_ids=tuple(ids)),)

    async def _large(self, context: RequestContext, nbytes: int, work: Callable[[], T]) -> T:
        """Return the result of `work`, in a thread for a large body."""
        if nbytes <= _INLINE_BYTES:
            return work()
        return await self._services.executors.json.run(context.caller.tenant, nbytes, work)


def _output(version: FunctionVersion) -> str:
    """Return the name of a function's output. Raises BadRequest for one that is not called by tensors."""
    if version.task not in _OUTPUTS:
        raise wrong_task(version)
    return _OUTPUTS[version.task]


def _chosen(version: FunctionVersion, given: Mapping[str, object]) -> str:
    """Return the input of a request. Raises BadRequest unless it is exactly one, or token ids with a mask."""
    known = [one.name for one in _INPUTS[version.task]]
    chosen = [name for name in given if name != _MASK]
    if len(chosen) != 1 or chosen[0] not in known or (_MASK in given and chosen[0] != "input_ids"):
        raise BadRequest(
            f"give exactly one input of {', '.join(name for name in known if name != _MASK)}"
            + (f"; {_MASK} goes with input_ids" if _MASK in known else ""),
            param="inputs",
        )
    return chosen[0]


def _image_work(task: FunctionTask, array: Array) -> Compute:
    kind = "classify" if task is FunctionTask.CLASSIFY else "image_features"
    return Compute(request_id="", instance_id="", kind=kind, pixels=array)  # type: ignore[arg-type]


def _width(version: FunctionVersion, assets: ModelAssets) -> int:
    """Return the columns of a function's output, 0 if its files do not name them."""
    if version.task is FunctionTask.CLASSIFY:
        return len(assets.labels)
    name = "hidden_size" if version.task is FunctionTask.EMBED else "projection_dim"
    width = assets.config.get(name)
    return width if isinstance(width, int) else 0
