"""/v1/embeddings, and the same by the generic invoke."""

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway import exchange as exchanges
from gateway.billing import prompt_tokens
from gateway.compute import Vector, as_json, rows, run_compute, shortened
from gateway.disconnect import Attended
from gateway.errors import BadRequest
from gateway.exchange import Exchange
from gateway.job import Job, together
from gateway.limits import decode, read_body
from gateway.responses import encoded
from gateway.schemas_openai import EmbeddingRequest
from gateway.services import Services
from gateway.tokenization import Encoder, split_prompts
from registry.function import FunctionVersion, Task
from registry.messages import Compute

_BATCH = 32  # inputs of one call: a long list is spread over instances
_CALLS_AT_ONCE = 8


class EmbeddingRoutes:
    """Endpoints that make vectors of text."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._decoder = msgspec.json.Decoder(EmbeddingRequest)

    async def embeddings(self, request: Request) -> ASGIApp:
        limits = self._services.settings.limits
        body = await read_body(request.scope, request.receive, limits, limit_bytes=limits.text_bytes)
        asked = decode(body, self._decoder, limits)
        exchange = exchanges.of(request.scope)
        version = await self._services.functions.resolve(asked.model, exchange.caller)
        return await self.reply(exchange, version, asked)

    async def reply(self, exchange: Exchange, version: FunctionVersion, asked: EmbeddingRequest) -> ASGIApp:
        """The reply to a checked request."""
        exchange.concerns(version)
        if version.task is not Task.EMBED:
            raise BadRequest(
                f"function {version.function!r} makes no embeddings (its task is {version.task})",
                param="model",
            )
        self._services.pulse.require()
        limits = self._services.settings.limits
        assets = await self._services.assets.get(version)
        encoder = Encoder(version, assets, inline_chars=limits.inline_chars)
        inputs = [
            await encoder.prompt(text, param="input")
            for text in split_prompts(asked.input, param="input", limit=limits.inputs)
        ]
        for index, ids in enumerate(inputs):
            if 0 < version.context_length < len(ids):
                raise BadRequest(
                    f"input {index} has {len(ids)} tokens, but the context holds {version.context_length}",
                    param="input",
                    code="context_length_exceeded",
                )
        return _EmbeddingReply(self._services, exchange, version, inputs, asked, assets.pooling)


class _EmbeddingReply:
    def __init__(
        self,
        services: Services,
        exchange: Exchange,
        version: FunctionVersion,
        inputs: list[tuple[int, ...]],
        asked: EmbeddingRequest,
        pooling: str,
    ) -> None:
        self._services = services
        self._exchange = exchange
        self._version = version
        self._inputs = inputs
        self._asked = asked
        self._pooling = pooling

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        vectors: dict[int, Vector] = {}
        async with Attended(receive) as attended:
            async with Job(self._services, self._exchange, self._version) as job:

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

                starts = range(0, len(self._inputs), _BATCH)
                await together(starts, batch, at_once=_CALLS_AT_ONCE)
                body = self._body(vectors, prompt_tokens(job.runs))
                await job.settle()
            attended.finish()
            await encoded(body, headers=job.headers(final=True))(scope, receive, send)

    def _body(self, vectors: dict[int, Vector], tokens: int) -> dict[str, object]:
        asked = self._asked
        data = []
        for index in range(len(self._inputs)):
            vector = vectors[index]
            if asked.dimensions is not None:
                if asked.dimensions > len(vector):
                    raise BadRequest(
                        f"the model's embeddings have {len(vector)} dimensions", param="dimensions"
                    )
                vector = shortened(vector, asked.dimensions)
            embedding = as_json(vector, base64_encoded=asked.encoding_format == "base64")
            data.append({"object": "embedding", "index": index, "embedding": embedding})
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": asked.model, "usage": usage}
