"""Leases in Redis: who leads, fenced by an epoch that only grows.

A lease's key expires by the wall clock of Redis. Should that clock be set back, the key of a holder that
died would stay for as long: so each renewal changes the key, and one that has not changed for its time
to live, by the clock of whoever asks, is taken over all the same.
"""

from dataclasses import dataclass

from registry import keys
from registry.clock import Clock, SystemClock
from registry.redis_connections import Connections, Script
from registry.redis_store import RedisStore, milliseconds

# The holder renews; a free lease goes to whoever asks, with the next epoch. A lease is {holder, beat}.
# Returns the epoch, or what stands there. KEYS lease epochs; ARGV name holder ttl-ms beat-that-is-dead
_ACQUIRE = Script(
    """
local held = redis.call('HMGET', KEYS[1], 'holder', 'beat')
if held[1] and held[1] ~= ARGV[2] and held[2] ~= ARGV[4] then return held[2] end
if held[1] ~= ARGV[2] then
  redis.call('DEL', KEYS[1])
  redis.call('HINCRBY', KEYS[2], ARGV[1], 1)
end
local beat = redis.call('HINCRBY', KEYS[2], ARGV[1] .. ' beats', 1)
redis.call('HSET', KEYS[1], 'holder', ARGV[2], 'beat', beat)
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return tonumber(redis.call('HGET', KEYS[2], ARGV[1]))
"""
)

# Only the holder can release. KEYS lease; ARGV holder
_RELEASE = Script(
    """
if redis.call('HGET', KEYS[1], 'holder') == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""
)


@dataclass(frozen=True, slots=True)
class _Seen:
    """Another's lease as it was found, and since when it has been so."""

    beat: bytes
    since_s: float


class RedisLeases(RedisStore):
    def __init__(
        self, connections: Connections, *, feed_length: int = keys.FEED_LENGTH, clock: Clock | None = None
    ) -> None:
        super().__init__(connections, feed_length=feed_length)
        self._clock = clock or SystemClock()
        self._seen: dict[str, _Seen] = {}

    async def acquire_lease(self, name: str, holder: str, ttl_s: float) -> int | None:
        now, seen = self._clock.monotonic_s(), self._seen.get(name)
        dead = seen.beat if seen is not None and now - seen.since_s >= ttl_s else b""
        answer = await self._redis.script(
            _ACQUIRE, [keys.lease(name), keys.LEASE_EPOCHS], [name, holder, milliseconds(ttl_s), dead]
        )
        if isinstance(answer, int):
            self._seen.pop(name, None)
            return answer
        if seen is None or seen.beat != answer:
            # From here on, not from the question: it may have been renewed just before a late answer.
            self._seen[name] = _Seen(answer, self._clock.monotonic_s())
        return None

    async def release_lease(self, name: str, holder: str) -> None:
        await self._redis.script(_RELEASE, [keys.lease(name)], [holder])
