"""Leases in Redis: who leads, fenced by an epoch that only grows."""

from registry import keys
from registry.redis_connections import Script
from registry.redis_store import RedisStore, milliseconds

# The holder renews; a free lease goes to whoever asks, with the next epoch. 0 means taken.
# KEYS lease epochs; ARGV name holder ttl-ms
_ACQUIRE = Script(
    """
local holder = redis.call('GET', KEYS[1])
if holder == ARGV[2] then
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
  return tonumber(redis.call('HGET', KEYS[2], ARGV[1]))
end
if holder then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return redis.call('HINCRBY', KEYS[2], ARGV[1], 1)
"""
)

# Only the holder can release. KEYS lease; ARGV holder
_RELEASE = Script(
    """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""
)


class RedisLeases(RedisStore):
    async def acquire_lease(self, name: str, holder: str, ttl_s: float) -> int | None:
        epoch = await self._redis.script(
            _ACQUIRE, [keys.lease(name), keys.LEASE_EPOCHS], [name, holder, milliseconds(ttl_s)]
        )
        return int(epoch) or None

    async def release_lease(self, name: str, holder: str) -> None:
        await self._redis.script(_RELEASE, [keys.lease(name)], [holder])
