"""/v1/embeddings, and its equivalent by the generic invoke."""

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.billing.request_record import prompt_tokens
from gateway.core.errors import BadRequest
from gateway.core.request_context import RequestContext, request_context
from gateway.http.disconnect import CancelOnDisconnect
from gateway.http.limits import decode, read_body
from gateway.http.pieces import encode_array
from gateway.http.responses import raw_json
from gateway.inference.tokenization import split_prompts
from gateway.requests.billed_request import BilledRequest, run_all
from gateway.requests.compute import Vector, as_json, rows, run_compute, shortened
from gateway.requests.services import Services
from gateway.requests.task_inputs import wrong_task
from gateway.schemas.openai import EmbeddingRequest
from gateway.tenants.cost_estimates import WorkBound
from registry.messages.node import Compute
from registry.records.function import FunctionTask, FunctionVersion

_BATCH = 32  # inputs of one call; a longer list is spread over instances
_MAX_CONCURRENT_CALLS = 8


class EmbeddingRoutes:
    """The handlers of text embeddings."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._decoder = msgspec.json.Decoder(EmbeddingRequest)

    async def embeddings(self, request: Request) -> ASGIApp:
        """Embed texts or token ids."""
        limits = self._services.settings.limits
        body = await read_body(request.scope, request.receive, limits, limit_bytes=limits.text_bytes)
        payload = decode(body, self._decoder, limits)
        context = request_context(request.scope)
        version = await self._services.functions.choose(payload.model, context)
        return await self.reply(context, version, payload)

    async def reply(
        self, context: RequestContext, version: FunctionVersion, payload: EmbeddingRequest
    ) -> "EmbeddingReply":
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
        return EmbeddingReply(self._services, context, version, inputs, payload, assets.pooling)


class EmbeddingReply:
    """The vectors of a request's inputs, as JSON."""

    def __init__(
        self,
        services: Services,
        context: RequestContext,
        version: FunctionVersion,
        inputs: list[tuple[int, ...]],
        payload: EmbeddingRequest,
        pooling: str,
    ) -> None:
        self._services = services
        self._context = context
        self._version = version
        self._inputs = inputs
        self._payload = payload
        self._pooling = pooling

    @property
    def bound(self) -> WorkBound:
        """What it computes at most."""
        batches = -(-len(self._inputs) // _BATCH)
        return WorkBound(calls=batches, prompt_tokens=sum(map(len, self._inputs)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        vectors: dict[int, Vector] = {}
        with CancelOnDisconnect(scope) as guard:
            starts = range(0, len(self._inputs), _BATCH)
            async with BilledRequest(self._services, self._context, self._version, self.bound) as job:

                async def batch(start: int) -> None:
                    ids = tuple(self._inputs[start : start + _BATCH])
                    work = Compute(
                        request_id=job.next_call_id(),
                        instance_id="",
                        kind="embed",
                        token_ids=ids,
                        pooling=self._pooling,
                    )
                    for offset, vector in enumerate(rows(await run_compute(job, work), "embeddings")):
                        vectors[start + offset] = vector

                await run_all(starts, batch, at_once=_MAX_CONCURRENT_CALLS)
                await job.complete()
                body = await self._body(vectors, prompt_tokens(job.runs))
            guard.disarm()
            await raw_json(body, headers=job.headers(final=True))(scope, receive, send)

    async def _body(self, vectors: dict[int, Vector], tokens: int) -> bytes:
        data = await encode_array(self._item(index, vectors[index]) for index in range(len(self._inputs)))
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        answer = {"object": "list", "data": data, "model": self._payload.model, "usage": usage}
        return msgspec.json.encode(answer)

    def _item(self, index: int, vector: Vector) -> dict[str, object]:
        dimensions = self._payload.dimensions
        if dimensions is not None:
            _check_dimensions(dimensions, len(vector))
            vector = shortened(vector, dimensions)
        embedding = as_json(vector, base64_encoded=self._payload.encoding_format == "base64")
        return {"object": "embedding", "index": index, "embedding": embedding}


def _check_dimensions(wanted: int | None, width: object) -> None:
    if wanted is not None and isinstance(width, int) and wanted > width:
        raise BadRequest(f"'dimensions' must be at most {width}, those of the model", param="dimensions")
