"""/v1/models: functions as OpenAI models."""

from starlette.requests import Request

from gateway.core.request_context import request_context
from gateway.requests.services import Services
from gateway.schemas.openai import ModelCard, ModelList
from registry.images.adapters import adapters_of, model_of


class ModelRoutes:
    """The handlers of models: the functions that the key may call, as `NAME` or `NAME:VERSION`."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def models(self, request: Request) -> ModelList:
        """List the models, each followed by its adapters."""
        key = request_context(request.scope).caller
        found = [
            ModelCard(id=model_of(function.name, adapter), created=int(made_at), owned_by="hypercast")
            for function, version in self._services.functions.visible(key)
            for adapter, made_at in (
                ("", function.created_at),
                *((name, version.created_at) for name in adapters_of(version.assets)),
            )
        ]
        return ModelList(data=found)

    async def model(self, request: Request) -> ModelCard:
        """Show one model."""
        spec = request.path_params["model"]
        version = await self._services.functions.resolve(spec, request_context(request.scope).caller)
        return ModelCard(id=spec, created=int(version.created_at), owned_by="hypercast")
