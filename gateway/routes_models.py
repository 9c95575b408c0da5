"""/v1/models: functions as models."""

from starlette.requests import Request
from starlette.responses import Response

from gateway import exchange as exchanges
from gateway.responses import encoded
from gateway.schemas_openai import Model, ModelList
from gateway.services import Services


class ModelRoutes:
    """Lists the functions that the key may call; ids are `NAME`, or `NAME:VERSION` when asked so."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def models(self, request: Request) -> Response:
        key = exchanges.of(request.scope).caller
        found = [
            Model(id=function.name, created=int(function.created_at), owned_by="hypercast")
            for function, _ in self._services.functions.visible(key)
        ]
        return encoded(ModelList(data=found))

    async def model(self, request: Request) -> Response:
        spec = request.path_params["model"]
        version = await self._services.functions.resolve(spec, exchanges.of(request.scope).caller)
        return encoded(Model(id=spec, created=int(version.created_at), owned_by="hypercast"))
