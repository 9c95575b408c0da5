"""/v1/models: functions as OpenAI models."""

from starlette.requests import Request

from gateway.core.request_context import request_context
from gateway.requests.services import Services
from gateway.schemas.openai import ModelCard, ModelList


class ModelRoutes:
    """The handlers of models: the functions that the key may call, as `NAME` or `NAME:VERSION`."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def models(self, request: Request) -> ModelList:
        """List the models."""
        key = request_context(request.scope).caller
        found = [
            ModelCard(id=function.name, created=int(function.created_at), owned_by="hypercast")
            for function, _ in self._services.functions.visible(key)
        ]
        return ModelList(data=found)

    async def model(self, request: Request) -> ModelCard:
        """Show one model."""
        spec = request.path_params["model"]
        version = await self._services.functions.resolve(spec, request_context(request.scope).caller)
        return ModelCard(id=spec, created=int(version.created_at), owned_by="hypercast")
