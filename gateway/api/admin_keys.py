"""/admin/keys and /admin/prices."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.errors import BadRequest, Unprocessable
from gateway.limits import decode, read_body
from gateway.responses import encoded
from gateway.schemas_admin import CreateKey, CreateRate, PatchKey
from gateway.services import Services
from registry.api_key import ApiKey, Role, SpendPeriod
from registry.errors import Conflict
from registry.function import check_name
from registry.secrets import new_api_key
from registry.usage import Rate

T = TypeVar("T")

_TRIES = 5


class KeyAdmin:
    """API keys and the price table."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._create = msgspec.json.Decoder(CreateKey)
        self._patch = msgspec.json.Decoder(PatchKey)
        self._rate = msgspec.json.Decoder(CreateRate)

    async def list_keys(self, request: Request) -> Response:
        keys = await self._services.state.keys()
        return encoded({"keys": [await self._with_spending(key) for key in keys]})

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
            clock=clock,
        )
        key = dataclasses.replace(
            made.key,
            max_concurrent=asked.max_concurrent,
            requests_per_minute=asked.requests_per_minute,
            tokens_per_minute=asked.tokens_per_minute,
            spend_limit_nanos=asked.spend_limit_nanos,
            spend_period=SpendPeriod(asked.spend_period),
        )
        await self._services.state.put_key(key)
        self._services.auth.forget(key.id)
        return encoded({**shown(key), "key": made.plaintext}, status=201)

    async def change_key(self, request: Request) -> Response:
        """Set or lift limits; other gateways know of it once they have forgotten the key's record."""
        asked = await self._body(request, self._patch)
        key = await self._replace(request.path_params["key_id"], asked.applied)
        return encoded(await self._with_spending(key))

    async def revoke_key(self, request: Request) -> Response:
        """Revoke a key; revoking it again changes nothing."""
        now = self._services.clock.wall_s()
        key = await self._replace(
            request.path_params["key_id"],
            lambda key: key if key.revoked_at is not None else dataclasses.replace(key, revoked_at=now),
        )
        return encoded(await self._with_spending(key))

    async def list_prices(self, request: Request) -> Response:
        return encoded({"rates": await self._services.state.rates()})

    async def create_price(self, request: Request) -> Response:
        """Add a price; a record keeps the one that it was billed at."""
        asked = await self._body(request, self._rate)
        rate = Rate(**msgspec.structs.asdict(asked))
        if rate.gpu_type != rate.gpu_type.strip():
            raise BadRequest("gpu_type must not begin or end with a space", param="gpu_type")
        currencies = {one.currency for one in await self._services.state.rates()}
        if currencies and rate.currency not in currencies:
            known = ", ".join(sorted(currencies))
            message = f"prices are in {known}: reports and spend limits add up costs of one currency"
            raise Unprocessable(message, param="currency")
        await self._services.state.put_rate(rate)
        await self._services.pulse.beat(rates=True)
        return encoded(rate, status=201)

    async def _replace(self, key_id: str, change: Callable[[ApiKey], ApiKey]) -> ApiKey:
        """Change a key's record, whoever else changes it at the same time."""
        state = self._services.state
        try:
            for _ in range(_TRIES):
                before = await state.key(key_id)
                after = change(before)
                with contextlib.suppress(Conflict):
                    await state.replace_key(before, after)
                    return after
            raise Conflict(f"the key {key_id} is being changed by others: try again")
        finally:
            self._services.auth.forget(key_id)

    async def _with_spending(self, key: ApiKey) -> dict[str, object]:
        """The key, and what of its spend limit is used; None where it has none."""
        spent = None
        if key.spend_limit_nanos is not None:
            now = self._services.clock.wall_s()
            spent = await self._services.state.spent_nanos(key.id, key.spend_period, now)
        return {**shown(key), "spent_nanos": spent}

    async def _body(self, request: Request, decoder: msgspec.json.Decoder[T]) -> T:
        limits = self._services.settings.limits
        body = await read_body(request.scope, request.receive, limits)
        return decode(body, decoder, limits)


def shown(key: ApiKey) -> dict[str, object]:
    """A key without what could help to guess it."""
    fields: dict[str, object] = msgspec.to_builtins(key)
    del fields["digest"]
    return fields
