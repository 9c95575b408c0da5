"""Who calls: a Bearer key to its record, and what that key may do."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import TypeVar

from gateway.errors import Forbidden, Unauthorized
from registry.api_key import ApiKey, Role
from registry.clock import Clock
from registry.errors import KeyRefused, NotFound
from registry.secrets import check_usable, matches, parse_key
from registry.state import KeyState

N = TypeVar("N")
T = TypeVar("T")

_CAPACITY = 4096
_MISSES = 512  # in a place of their own: a flood of invented keys pushes no real one out
_USUAL_BYTES = 512  # of an Authorization header with a key
_OPEN = frozenset({"/livez", "/readyz", "/health", "/metrics", "/openapi.json"})
_ADMIN = "/admin/"
_USAGE = "/admin/usage/"  # callers see their own tenant's


@dataclass(frozen=True, slots=True)
class _Cached:
    until_s: float
    key: ApiKey


@dataclass(frozen=True, slots=True)
class _Recognised:
    """What an Authorization header was found to hold: the key of this id with this digest."""

    id: str
    digest: str


class Authenticator:
    """Checks keys; records (and the lack of one) are remembered for `cache_s`, so a revoked key works
    for so long at most on other gateways than the one that revoked it."""

    def __init__(self, state: KeyState, clock: Clock, *, cache_s: float) -> None:
        self._state = state
        self._clock = clock
        self._cache_s = cache_s
        self._cache: OrderedDict[str, _Cached] = OrderedDict()  # the one used last is last
        self._misses: OrderedDict[str, float] = OrderedDict()  # until when each is known to be no key
        # Only headers that brought a good key: reading and hashing one is a good part of a short request.
        self._recognised: OrderedDict[bytes, _Recognised] = OrderedDict()

    async def authenticate(self, authorization: bytes | None) -> ApiKey:
        """The record of the presented key. Raises Unauthorized, StateUnavailable."""
        if authorization is None:
            raise Unauthorized("no API key: send 'Authorization: Bearer hc_…'", code="missing_api_key")
        if (known := self._recognised.get(authorization)) is not None:
            key = self._cached(known.id)
            if key is not None and key.digest == known.digest:
                self._recognised.move_to_end(authorization)
                return _usable(key, self._clock.wall_s())
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
        if len(authorization) <= _USUAL_BYTES:
            _put(self._recognised, authorization, _Recognised(key.id, key.digest), _CAPACITY)
        return _usable(key, self._clock.wall_s())

    def forget(self, key_id: str) -> None:
        """The key was changed here."""
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
    try:
        return check_usable(key, now)
    except KeyRefused as error:
        raise Unauthorized(str(error)) from None


def _put(cache: OrderedDict[N, T], name: N, value: T, capacity: int) -> None:
    cache[name] = value
    cache.move_to_end(name)
    while len(cache) > capacity:
        cache.popitem(last=False)


def is_open(path: str) -> bool:
    """Whether a path needs no key."""
    return path in _OPEN


def authorize(key: ApiKey, path: str) -> None:
    """Raise Forbidden if the key's role does not reach the path."""
    if path.startswith(_ADMIN) and key.role is not Role.ADMIN and not path.startswith(_USAGE):
        raise Forbidden("this needs an admin key")


def admits(key: ApiKey, tenant: str) -> bool:
    """Whether the key may see records of `tenant`."""
    return key.role is Role.ADMIN or key.tenant == tenant
