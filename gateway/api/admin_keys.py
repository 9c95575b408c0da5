"""/admin/keys and /admin/prices."""

import contextlib
import dataclasses
import math
from collections.abc import Callable

import msgspec
from starlette.requests import Request

from gateway.api.bodies import read_json
from gateway.core.errors import ApiError, BadRequest, Unprocessable
from gateway.core.request_context import request_context
from gateway.core.rights import RIGHTS
from gateway.requests.services import Services
from gateway.schemas.admin import CreateKey, CreateRate, PatchKey, RotateKey
from gateway.schemas.answers import KeyList, KeyView, NewKey, OwnKey, RateList, RotatedKey, view
from registry.config.secrets import check_usable, new_api_key
from registry.errors import Conflict, KeyRefused
from registry.records.api_key import ApiKey, KeyRole, SpendPeriod
from registry.records.function import check_name
from registry.records.usage import PriceRate

_TRIES = 5
# Of OwnKey and of ApiKey.
_OWN_FIELDS = (
    *("id", "tenant", "role", "name", "functions", "expires_at", "max_concurrent", "requests_per_minute"),
    *("tokens_per_minute", "spend_limit_nanos", "spend_period"),
)


class KeyAdmin:
    """The handlers of API keys and the price table."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._create = msgspec.json.Decoder(CreateKey)
        self._rotate = msgspec.json.Decoder(RotateKey)
        self._patch = msgspec.json.Decoder(PatchKey)
        self._rate = msgspec.json.Decoder(CreateRate)

    async def list_keys(self, request: Request) -> msgspec.Struct:
        """List the keys with their spending."""
        keys = await self._services.state.keys()
        answer: msgspec.Struct = KeyList(keys=[await self._with_spending(key) for key in keys])
        return answer

    async def own_key(self, request: Request) -> OwnKey:
        """Return what the key of the request is, may do and has left."""
        key, settings = request_context(request.scope).caller, self._services.settings
        same = {name: getattr(key, name) for name in _OWN_FIELDS}
        return OwnKey(
            **same,
            rights=sorted(right.value for right in RIGHTS[key.role]),
            spent_nanos=await self._spent(key),
            currency=self._services.health.currency,
            gateway=settings.gateway_id,
        )

    async def create_key(self, request: Request) -> msgspec.Struct:
        """Create a key; only this response ever holds the key itself."""
        payload = await read_json(request, self._services, self._create)
        clock = self._services.clock
        expires_at = None if payload.expires_in_s is None else clock.wall_s() + payload.expires_in_s
        made = new_api_key(
            payload.tenant,
            payload.role,
            payload.name,
            functions=[check_name(name) for name in payload.functions],
            expires_at=expires_at,
            clock=clock,
        )
        key = dataclasses.replace(
            made.key,
            max_concurrent=payload.max_concurrent,
            requests_per_minute=payload.requests_per_minute,
            tokens_per_minute=payload.tokens_per_minute,
            spend_limit_nanos=payload.spend_limit_nanos,
            spend_period=SpendPeriod(payload.spend_period),
        )
        await self._services.state.put_key(key)
        self._services.auth.invalidate(key.id)
        return view(NewKey, key, key=made.plaintext)

    async def change_key(self, request: Request) -> msgspec.Struct:
        """Set or lift limits; other gateways follow once their cached record has expired."""
        payload = await read_json(request, self._services, self._patch)
        key = await self._replace(request.path_params["key_id"], payload.applied)
        return await self._with_spending(key)

    async def rotate_key(self, request: Request) -> msgspec.Struct:
        """Create a key like another, of the same lifetime; the other one expires after the grace period."""
        payload = await read_json(request, self._services, self._rotate)
        now = self._services.clock.wall_s()
        former = _usable(await self._services.state.key(request.path_params["key_id"]), now)
        made = new_api_key(former.tenant, former.role, former.name, clock=self._services.clock)
        ends = former.expires_at
        key = dataclasses.replace(
            former,
            id=made.key.id,
            digest=made.key.digest,
            created_at=made.key.created_at,
            expires_at=None if ends is None else now + ends - former.created_at,
        )
        # In this order: a failure leaves a key that nobody has, and not a former one that ends unreplaced.
        await self._services.state.put_key(key)
        former = await self._replace(former.id, lambda before: _expiring(before, now + payload.grace_s))
        return view(RotatedKey, key, key=made.plaintext, former_expires_at=former.expires_at)

    async def revoke_key(self, request: Request) -> msgspec.Struct:
        """Revoke a key, but not the last admin key that works. Idempotent."""
        now, key_id = self._services.clock.wall_s(), request.path_params["key_id"]
        admins = {key.id for key in await self._services.state.keys() if _is_working_admin(key, now)}
        if admins == {key_id}:
            message = f"{key_id} is the last admin key: first create another with `keys create --role admin`"
            raise ApiError(409, "last_admin_key", message)
        key = await self._replace(
            key_id,
            lambda key: key if key.revoked_at is not None else dataclasses.replace(key, revoked_at=now),
        )
        return await self._with_spending(key)

    async def list_prices(self, request: Request) -> RateList:
        """List the price table."""
        return RateList(rates=await self._services.state.rates())

    async def create_price(self, request: Request) -> PriceRate:
        """Add a price; a usage record keeps the price at which it was billed."""
        payload = await read_json(request, self._services, self._rate)
        rate = PriceRate(**msgspec.structs.asdict(payload))
        if rate.gpu_type != rate.gpu_type.strip():
            raise BadRequest("gpu_type must not begin or end with a space", param="gpu_type")
        currencies = {one.currency for one in await self._services.state.rates()}
        if currencies and rate.currency not in currencies:
            known = ", ".join(sorted(currencies))
            message = (
                f"currency must be {known}, as that of the other prices: costs are summed in one currency"
            )
            raise Unprocessable(message, param="currency")
        await self._services.state.put_rate(rate)
        await self._services.health.probe(rates=True)
        return rate

    async def _replace(self, key_id: str, change: Callable[[ApiKey], ApiKey]) -> ApiKey:
        """Replace a key's record, retrying on concurrent changes. Raises NotFound, Conflict."""
        state = self._services.state
        try:
            for _ in range(_TRIES):
                before = await state.key(key_id)
                after = change(before)
                with contextlib.suppress(Conflict):
                    await state.replace_key(before, after)
                    return after
            raise Conflict(f"key {key_id} is being changed by others: retry")
        finally:
            self._services.auth.invalidate(key_id)

    async def _with_spending(self, key: ApiKey) -> msgspec.Struct:
        """Return the key with the amount spent of its limit, None where it has no limit."""
        return view(KeyView, key, spent_nanos=await self._spent(key))

    async def _spent(self, key: ApiKey) -> int | None:
        if key.spend_limit_nanos is None:
            return None
        return await self._services.state.spent_nanos(key.id, key.spend_period, self._services.clock.wall_s())


def _usable(key: ApiKey, now_s: float) -> ApiKey:
    try:
        return check_usable(key, now_s)
    except KeyRefused as error:
        raise Conflict(f"{error}: create a new one") from error


def _expiring(key: ApiKey, at_s: float) -> ApiKey:
    return dataclasses.replace(key, expires_at=min(at_s, key.expires_at or math.inf))


def _is_working_admin(key: ApiKey, now_s: float) -> bool:
    ends_s = min(key.revoked_at or math.inf, key.expires_at or math.inf)
    return key.role is KeyRole.ADMIN and now_s < ends_s
