"""/v1/quote: the price of a request before it runs."""

import msgspec
from starlette.requests import Request

from gateway.api.bodies import read_text
from gateway.api.routes_functions import FunctionRoutes
from gateway.core.errors import Unprocessable
from gateway.core.request_context import request_context
from gateway.http.limits import decode
from gateway.inference.tokenization import split_prompts
from gateway.requests.services import Services
from gateway.schemas.answers import Quote, QuotePart
from gateway.schemas.functions import FeaturesRequest
from gateway.schemas.openai import Name
from gateway.tenants.cost_estimates import CostEstimate, WorkBound
from registry.exports.charges import Meter
from registry.exports.decimals import nanos_text
from registry.images.adapters import split_adapter
from registry.records.function import FunctionTask, FunctionVersion

_TEXT_TASKS = (FunctionTask.GENERATE, FunctionTask.EMBED)


class _Addressed(msgspec.Struct, frozen=True, kw_only=True):
    """What a body names, whatever else is in it."""

    model: Name


class QuoteRoutes:
    """The handler of quotes. What it returns is what a spend limit would reserve for the request."""

    def __init__(self, services: Services, functions: FunctionRoutes) -> None:
        self._services = services
        self._functions = functions
        self._addressed = msgspec.json.Decoder(_Addressed)
        self._features = msgspec.json.Decoder(FeaturesRequest)

    async def quote(self, request: Request) -> Quote:
        """Validate and tokenize a request as if it were to run, and return what it may cost."""
        limits = self._services.settings.limits
        body = await read_text(request, limits)
        model = decode(body, self._addressed, limits).model
        name, _ = split_adapter(model)
        version = await self._services.functions.resolve(name, request_context(request.scope).caller)
        bound = await self._bound(request, version, model, body)
        estimate = self._services.quotas.estimate(version, bound, self._gpu_types)
        return _quote(model, version, bound, estimate, self._services.health.currency)

    def _gpu_types(self) -> set[str]:
        return {up.record.gpu_type for up in self._services.cluster.view().nodes}

    async def _bound(self, request: Request, version: FunctionVersion, model: str, body: bytes) -> WorkBound:
        # A copy: a quote is no call of the function in metrics and the access log.
        context = msgspec.structs.replace(request_context(request.scope))
        if version.task in _TEXT_TASKS:
            return (await self._functions.text_reply(context, version, model, body)).bound
        if version.task is not FunctionTask.FEATURES:
            return WorkBound()
        payload = decode(body, self._features, self._services.settings.limits)
        if (payload.text is None) == (payload.image is None):
            raise Unprocessable("give exactly one of 'text' and 'image'", param="text")
        if payload.text is None:
            return WorkBound()
        assets = await self._services.assets.get(version)
        texts = split_prompts(payload.text, param="text", limit=self._services.settings.limits.inputs)
        ids = await self._services.encoder(version, assets, context).prompts(texts, param="text")
        return WorkBound(prompt_tokens=sum(map(len, ids)))


def _quote(
    model: str, version: FunctionVersion, bound: WorkBound, estimate: CostEstimate | None, currency: str
) -> Quote:
    if estimate is None:
        parts = [(Meter.REQUESTS, 1, 0)]
        total = 0
    else:
        of, total = estimate.parts, estimate.parts.total
        parts = [
            (Meter.REQUESTS, 1, of.request),
            (Meter.PROMPT, bound.prompt_tokens, of.prompt),
            (Meter.COMPLETION, bound.completion_tokens, of.completion),
            (Meter.GPU, estimate.gpu_ms, of.gpu),
        ]
    return Quote(
        model=model,
        version=version.version,
        currency=currency,
        cost_nanos=total,
        cost=nanos_text(total),
        rate=None if estimate is None else estimate.rate.id,
        gpu_type=None if estimate is None else estimate.rate.gpu_type,
        gpu_time="measured" if estimate is not None and estimate.measured else "assumed",
        parts=[QuotePart(meter=meter, quantity=used, cost_nanos=cost) for meter, used, cost in parts],
    )
