"""The shared state in Redis (5 or later; nothing newer than 6.2 is used).

The other modules of this package hold its parts. Each change is one Lua script that also appends to the feed;
records are JSON; reads that span keys are scripts too.
"""

from types import TracebackType
from typing import Self

from rdmacast.protocol.tls import TlsFiles
from registry import keys
from registry.codec import decode, encode, encode_marked
from registry.errors import Conflict, NotFound
from registry.records.api_key import ApiKey
from registry.redis.audit import RedisAudit
from registry.redis.batches import RedisBatches
from registry.redis.casts import RedisCasts
from registry.redis.connections import TIMEOUT_S, ConnectionPool, LuaScript
from registry.redis.feed import RedisFeed
from registry.redis.functions import RedisFunctions
from registry.redis.jobs import RedisJobs
from registry.redis.lease import RedisLeases
from registry.redis.ledger import RedisLedger
from registry.redis.live import RedisLive
from registry.redis.nodes import RedisNodes
from registry.redis.quota import RedisQuotas
from registry.redis.scaling import RedisScaling
from registry.state import ClusterConfig, State

# Replace a key's record if it is still the one that was read; without a token limit also clear its token
# count. Returns 0 if the record was changed.
# KEYS keys bucket; ARGV key-id before after has-tokens-limit
_REPLACE_KEY = LuaScript("""
local found = redis.call('HGET', KEYS[1], ARGV[1])
if found == ARGV[3] then return 1 end
if found ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
if ARGV[4] == '0' then redis.call('HDEL', KEYS[2], 'tokens') end
return 1
""")


class RedisState(
    RedisFunctions,
    RedisNodes,
    RedisCasts,
    RedisLive,
    RedisScaling,
    RedisFeed,
    RedisLeases,
    RedisAudit,
    RedisQuotas,
    RedisLedger,
    RedisJobs,
    RedisBatches,
    State,
):
    """The whole shared state over one connection pool; use as `async with`, or `aclose()`."""

    @classmethod
    def connect(
        cls,
        url: str,
        *,
        password: str = "",
        wait_replicas: int = 0,
        tls: TlsFiles | None = None,
        max_connections: int = 16,
        timeout_s: float = TIMEOUT_S,
        feed_length: int = keys.FEED_LENGTH,
    ) -> Self:
        """Return the state at a URL; connections are opened on demand.

        URLs are `redis://`, `rediss://`, `unix:///path` and `redis+sentinel://host:port,…/name`. A ledger
        record counts as written once `wait_replicas` replicas have it.
        """
        connections = ConnectionPool(
            url,
            password=password,
            wait_replicas=wait_replicas,
            tls=tls,
            limit=max_connections,
            timeout_s=timeout_s,
        )
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
        raw = await self._redis.call("GET", keys.CLUSTER)
        if raw is None and default is not None:
            await self._redis.call("SET", keys.CLUSTER, encode(default), "NX")
            raw = await self._redis.call("GET", keys.CLUSTER)
        if raw is None:
            raise NotFound("the cluster has no configuration yet: start a gateway first")
        config = decode(ClusterConfig, raw, keys.CLUSTER)
        if default is not None and config.schema < default.schema:
            await self._raise_schema(default.schema)
            return await self.cluster_config()
        return config.check_readable()

    async def put_key(self, key: ApiKey) -> None:
        await self._raise_schema(key.schema)
        await self._redis.call("HSET", keys.API_KEYS, key.id, encode_marked(key, key.schema))

    async def key(self, key_id: str) -> ApiKey:
        return decode(ApiKey, await self._raw_key(key_id), f"{keys.API_KEYS}[{key_id}]")

    async def replace_key(self, before: ApiKey, after: ApiKey) -> None:
        raw = await self._raw_key(before.id)
        found = decode(ApiKey, raw, f"{keys.API_KEYS}[{before.id}]")
        if found not in (before, after) or not await self._redis.script(
            _REPLACE_KEY,
            [keys.API_KEYS, keys.bucket(before.id)],
            [before.id, raw, encode_marked(after, after.schema), int(after.tokens_per_minute is not None)],
        ):
            raise Conflict(f"the key {before.id} was changed concurrently")

    async def keys(self) -> list[ApiKey]:
        raws = await self._redis.call("HVALS", keys.API_KEYS)
        found = [decode(ApiKey, raw, keys.API_KEYS) for raw in raws]
        return sorted(found, key=lambda key: (key.created_at, key.id))

    async def _raw_key(self, key_id: str) -> bytes:
        raw: bytes | None = await self._redis.call("HGET", keys.API_KEYS, key_id)
        if raw is None:
            raise NotFound(f"no key {key_id}")
        return raw

    async def ping(self) -> None:
        # A write that changes nothing, refused where writes are: full memory, full disk, a replica.
        await self._redis.call("SETRANGE", keys.PROBE, 0, "")

    async def aclose(self) -> None:
        await self._redis.aclose()
