"""Authentication of Bearer keys, and the rights that a key's role gives."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import TypeVar

from gateway.core.errors import Forbidden, Unauthorized
from gateway.core.rights import RIGHTS, Right, may, roles_with
from registry.clock import Clock
from registry.config.secrets import check_usable, matches, parse_key
from registry.errors import KeyRefused, NotFound
from registry.records.api_key import ApiKey
from registry.state import KeyState

N = TypeVar("N")
T = TypeVar("T")

_CAPACITY = 4096
_MISSES = 512  # cached apart, so that a flood of invented keys evicts no real one
_MAX_CACHED_BYTES = 512  # of an Authorization header with a key


@dataclass(frozen=True, slots=True)
class _Cached:
    until_s: float
    key: ApiKey


@dataclass(frozen=True, slots=True)
class _KnownHeader:
    """The parsed content of an Authorization header: the key of this id with this digest."""

    id: str
    digest: str


class Authenticator:
    """A cache of API keys. Records, and the lack of one, are cached for `cache_s`.

    A revoked key works for at most `cache_s` on gateways other than the one that revoked it.
    """

    def __init__(self, state: KeyState, clock: Clock, *, cache_s: float) -> None:
        self._state = state
        self._clock = clock
        self._cache_s = cache_s
        self._cache: OrderedDict[str, _Cached] = OrderedDict()  # least recently used first
        self._misses: OrderedDict[str, float] = OrderedDict()  # id to the time at which the miss expires
        # Headers with a good key: parsing and hashing one is a large part of a short request.
        self._known_headers: OrderedDict[bytes | None, _KnownHeader] = OrderedDict()

    def known(self, authorization: bytes | None) -> ApiKey | None:
        """Return the key of a header that was authenticated before, while cached. Raises Unauthorized."""
        known = self._known_headers.get(authorization)
        if known is None or (key := self._cached(known.id)) is None or key.digest != known.digest:
            return None
        self._known_headers.move_to_end(authorization)
        return _usable(key, self._clock.wall_s())

    async def authenticate(self, authorization: bytes | None) -> ApiKey:
        """Return the record of the presented key. Raises Unauthorized, StateUnavailable."""
        if authorization is None:
            raise Unauthorized("no API key: send 'Authorization: Bearer hc_…'", code="missing_api_key")
        scheme, _, presented = authorization.decode("latin-1").partition(" ")
        if scheme.lower() != "bearer":
            raise Unauthorized("the Authorization header must be 'Bearer <key>'")
        try:
            parsed = parse_key(presented)
        except KeyRefused as error:
            raise Unauthorized(str(error)) from None
        key = self._cached(parsed.id) or await self._record(parsed.id)
        if key is None or not matches(key, parsed):
            raise Unauthorized("unknown API key")
        if len(authorization) <= _MAX_CACHED_BYTES:
            _put(self._known_headers, authorization, _KnownHeader(key.id, key.digest), _CAPACITY)
        return _usable(key, self._clock.wall_s())

    def invalidate(self, key_id: str) -> None:
        """Drop the cached record of a key that was changed here."""
        self._cache.pop(key_id, None)
        self._misses.pop(key_id, None)

    def _cached(self, key_id: str) -> ApiKey | None:
        cached = self._cache.get(key_id)
        if cached is None or self._clock.monotonic_s() >= cached.until_s:
            return None
        self._cache.move_to_end(key_id)
        return cached.key

    async def _record(self, key_id: str) -> ApiKey | None:
        now = self._clock.monotonic_s()
        if now < self._misses.get(key_id, now):
            return None
        try:
            key = await self._state.key(key_id)
        except NotFound:
            self._cache.pop(key_id, None)
            _put(self._misses, key_id, now + self._cache_s, _MISSES)
            return None
        _put(self._cache, key_id, _Cached(now + self._cache_s, key), _CAPACITY)
        return key


def _usable(key: ApiKey, now: float) -> ApiKey:
    if key.revoked_at is None and key.expires_at is None:
        return key
    try:
        return check_usable(key, now)
    except KeyRefused as error:
        raise Unauthorized(str(error)) from None


def _put(cache: OrderedDict[N, T], name: N, value: T, capacity: int) -> None:
    cache[name] = value
    cache.move_to_end(name)
    while len(cache) > capacity:
        cache.popitem(last=False)


def require_right(key: ApiKey, right: Right, path: str) -> None:
    """Raise Forbidden unless the key's role has the right."""
    if right not in RIGHTS[key.role]:
        roles = " or ".join(roles_with(right))
        raise Forbidden(f"{path} needs a key of the role {roles}; this key has the role {key.role.value!r}")


def may_see_tenant(key: ApiKey, tenant: str) -> bool:
    """Return whether what the key may see includes the data of `tenant`."""
    return key.tenant == tenant or may(key, Right.ALL_TENANTS)


def may_manage(key: ApiKey, owner: str) -> bool:
    """Return whether the key may change a function of this owner; the operator's own have the owner ""."""
    return may(key, Right.MANAGE_FUNCTIONS) and may_see_tenant(key, owner)
