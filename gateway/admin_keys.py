"""/admin/keys and /admin/prices."""

import dataclasses
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.errors import BadRequest
from gateway.limits import decode, read_body
from gateway.responses import encoded
from gateway.schemas_admin import CreateKey, CreateRate
from gateway.services import Services
from registry.api_key import ApiKey, Role
from registry.function import check_name
from registry.secrets import new_api_key
from registry.usage import Rate

T = TypeVar("T")


class KeyAdmin:
    """API keys and the price table."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._create = msgspec.json.Decoder(CreateKey)
        self._rate = msgspec.json.Decoder(CreateRate)

    async def list_keys(self, request: Request) -> Response:
        keys = await self._services.state.keys()
        return encoded({"keys": [shown(key) for key in keys]})

    async def create_key(self, request: Request) -> Response:
        """Make a key; the answer is the only place where the key itself ever stands."""
        asked = await self._body(request, self._create)
        clock = self._services.clock
        expires_at = None if asked.expires_in_s is None else clock.wall_s() + asked.expires_in_s
        made = new_api_key(
            asked.tenant,
            Role(asked.role),
            asked.name,
            functions=[check_name(name) for name in asked.functions],
            expires_at=expires_at,
            max_concurrent=asked.max_concurrent,
            clock=clock,
        )
        await self._services.state.put_key(made.key)
        self._services.auth.forget(made.key.id)
        return encoded({**shown(made.key), "key": made.plaintext}, status=201)

    async def revoke_key(self, request: Request) -> Response:
        """Revoke a key; revoking it again changes nothing."""
        key = await self._services.state.key(request.path_params["key_id"])
        if key.revoked_at is None:
            key = dataclasses.replace(key, revoked_at=self._services.clock.wall_s())
            await self._services.state.put_key(key)
        self._services.auth.forget(key.id)
        return encoded(shown(key))

    async def list_prices(self, request: Request) -> Response:
        return encoded({"rates": await self._services.state.rates()})

    async def create_price(self, request: Request) -> Response:
        """Add a price; a record keeps the one that it was billed at."""
        asked = await self._body(request, self._rate)
        rate = Rate(**msgspec.structs.asdict(asked))
        if rate.gpu_type != rate.gpu_type.strip():
            raise BadRequest("gpu_type must not begin or end with a space", param="gpu_type")
        await self._services.state.put_rate(rate)
        await self._services.pulse.beat(rates=True)
        return encoded(rate, status=201)

    async def _body(self, request: Request, decoder: msgspec.json.Decoder[T]) -> T:
        limits = self._services.settings.limits
        body = await read_body(request.scope, request.receive, limits)
        return decode(body, decoder, limits)


def shown(key: ApiKey) -> dict[str, object]:
    """A key without what could help to guess it."""
    fields: dict[str, object] = msgspec.to_builtins(key)
    del fields["digest"]
    return fields
