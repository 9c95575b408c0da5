"""The shared state in Redis (5 or later; nothing newer than 6.2 is used).

Its parts stand in redis_functions, redis_nodes, redis_feed, redis_lease and redis_ledger. Each change
is one Lua script that also appends to the feed; records are JSON; reads that span keys are scripts too.
"""

from types import TracebackType
from typing import Self

from registry import keys
from registry.api_key import ApiKey
from registry.codec import decode, encode
from registry.errors import NotFound
from registry.redis_connections import Connections
from registry.redis_feed import RedisFeed
from registry.redis_functions import RedisFunctions
from registry.redis_lease import RedisLeases
from registry.redis_ledger import RedisLedger
from registry.redis_nodes import RedisNodes
from registry.state import ClusterConfig, State


class RedisState(RedisFunctions, RedisNodes, RedisFeed, RedisLeases, RedisLedger, State):
    """All of the shared state over one bounded set of connections; use as `async with`, or `aclose()`."""

    @classmethod
    def connect(
        cls,
        url: str,
        *,
        max_connections: int = 16,
        timeout_s: float = 5.0,
        feed_length: int = keys.FEED_LENGTH,
    ) -> Self:
        """The state at `redis://`, `rediss://` or `unix:///path`; connections are made when needed."""
        connections = Connections(url, limit=max_connections, timeout_s=timeout_s)
        return cls(connections, feed_length=feed_length)

    def __repr__(self) -> str:
        return f"<RedisState {self._redis!r}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def cluster_config(self, default: ClusterConfig | None = None) -> ClusterConfig:
        if default is not None:
            await self._redis.call("SET", keys.CLUSTER, encode(default), "NX")
        raw = await self._redis.call("GET", keys.CLUSTER)
        if raw is None:
            raise NotFound("the cluster has no configuration yet: start a gateway first")
        return decode(ClusterConfig, raw, keys.CLUSTER)

    async def put_key(self, key: ApiKey) -> None:
        await self._redis.call("HSET", keys.API_KEYS, key.id, encode(key))

    async def key(self, key_id: str) -> ApiKey:
        raw = await self._redis.call("HGET", keys.API_KEYS, key_id)
        if raw is None:
            raise NotFound(f"no key {key_id}")
        return decode(ApiKey, raw, f"{keys.API_KEYS}[{key_id}]")

    async def keys(self) -> list[ApiKey]:
        raws = await self._redis.call("HVALS", keys.API_KEYS)
        found = [decode(ApiKey, raw, keys.API_KEYS) for raw in raws]
        return sorted(found, key=lambda key: (key.created_at, key.id))

    async def ping(self) -> None:
        await self._redis.call("PING")

    async def aclose(self) -> None:
        await self._redis.aclose()
