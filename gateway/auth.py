"""Who calls: a Bearer key to its record, and what that key may do."""

from collections import OrderedDict
from dataclasses import dataclass

from gateway.errors import Forbidden, Unauthorized
from registry.api_key import ApiKey, Role
from registry.clock import Clock
from registry.errors import KeyRefused, NotFound
from registry.secrets import check_usable, matches, parse_key
from registry.state import KeyState

_CAPACITY = 4096
_OPEN = frozenset({"/livez", "/readyz", "/health", "/metrics", "/openapi.json"})
_ADMIN = "/admin/"
_USAGE = "/admin/usage/"  # callers see their own tenant's


@dataclass(frozen=True, slots=True)
class _Cached:
    until_s: float
    key: ApiKey | None  # None: there is no such key


class Authenticator:
    """Checks keys; records (and the lack of one) are remembered for `cache_s`, so a revoked key works
    for so long at most on other gateways than the one that revoked it."""

    def __init__(self, state: KeyState, clock: Clock, *, cache_s: float) -> None:
        self._state = state
        self._clock = clock
        self._cache_s = cache_s
        self._cache: OrderedDict[str, _Cached] = OrderedDict()

    async def authenticate(self, authorization: bytes | None) -> ApiKey:
        """The record of the presented key. Raises Unauthorized, StateUnavailable."""
        if authorization is None:
            raise Unauthorized("no API key: send 'Authorization: Bearer hc_…'", code="missing_api_key")
        scheme, _, presented = authorization.decode("latin-1").partition(" ")
        if scheme.lower() != "bearer":
            raise Unauthorized("the Authorization header must be 'Bearer <key>'")
        try:
            parsed = parse_key(presented)
            key = await self._record(parsed.id)
            if key is None or not matches(key, parsed):
                raise Unauthorized("unknown API key")
            return check_usable(key, self._clock.wall_s())
        except KeyRefused as error:
            raise Unauthorized(str(error)) from None

    def forget(self, key_id: str) -> None:
        """The key was changed here."""
        self._cache.pop(key_id, None)

    async def _record(self, key_id: str) -> ApiKey | None:
        now = self._clock.monotonic_s()
        cached = self._cache.get(key_id)
        if cached is not None and now < cached.until_s:
            return cached.key
        try:
            key: ApiKey | None = await self._state.key(key_id)
        except NotFound:
            key = None
        self._cache[key_id] = _Cached(now + self._cache_s, key)
        self._cache.move_to_end(key_id)
        while len(self._cache) > _CAPACITY:
            self._cache.popitem(last=False)
        return key


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
