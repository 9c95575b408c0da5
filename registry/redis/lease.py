"""Leases in Redis, fenced by an incarnation of the state and a growing epoch.

The key of a lease expires by the wall clock of Redis. If that clock is set back, the key of a dead holder
stays longer: so each renewal changes the key, and a key that has not changed for its time to live, by the
clock of the contender, is taken over.
"""

from dataclasses import dataclass

from registry import keys
from registry.clock import Clock, SystemClock
from registry.records.fence import NO_FENCE, Fence
from registry.redis.connections import ConnectionPool, LuaScript
from registry.redis.store import WRITE_WHEN_FULL, RedisStore, redis_ttl_ms

# The holder renews; a free lease is acquired with the next epoch. A lease is {holder, beat}. The state gets
# a new incarnation if it has none, or is older than the fence that the caller has seen.
# Returns incarnation and epoch, or the beat of another holder. KEYS lease epochs incarnation
# ARGV name holder ttl-ms expired-beat seen-incarnation seen-epoch new-incarnation
_ACQUIRE = LuaScript(
    WRITE_WHEN_FULL
    + """
local held = redis.call('HMGET', KEYS[1], 'holder', 'beat')
if held[1] and held[1] ~= ARGV[2] and held[2] ~= ARGV[4] then return held[2] end
local incarnation = redis.call('GET', KEYS[3])
local epoch, seen = tonumber(redis.call('HGET', KEYS[2], ARGV[1]) or '0'), tonumber(ARGV[6])
if not incarnation or incarnation < ARGV[5] or (incarnation == ARGV[5] and epoch < seen) then
  incarnation, epoch = ARGV[7], math.max(epoch, seen)
  redis.call('SET', KEYS[3], incarnation)
  redis.call('DEL', KEYS[1])
  held[1] = false
end
if held[1] ~= ARGV[2] then
  redis.call('DEL', KEYS[1])
  epoch = epoch + 1
  redis.call('HSET', KEYS[2], ARGV[1], epoch)
end
local beat = redis.call('HINCRBY', KEYS[2], ARGV[1] .. ' beats', 1)
redis.call('HSET', KEYS[1], 'holder', ARGV[2], 'beat', beat)
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return {incarnation, epoch}
"""
)

# Only the holder can release. KEYS lease; ARGV holder
_RELEASE = LuaScript("""
if redis.call('HGET', KEYS[1], 'holder') == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
""")


@dataclass(frozen=True, slots=True)
class _Seen:
    """The lease of another holder as it was read, and since when it is unchanged."""

    beat: bytes
    since_s: float


class RedisLeases(RedisStore):
    """Named leases."""

    def __init__(
        self, connections: ConnectionPool, *, feed_length: int = keys.FEED_LENGTH, clock: Clock | None = None
    ) -> None:
        super().__init__(connections, feed_length=feed_length)
        self._clock = clock or SystemClock()
        self._seen: dict[str, _Seen] = {}

    async def acquire_lease(
        self, name: str, holder: str, ttl_s: float, *, beyond: Fence = NO_FENCE
    ) -> Fence | None:
        now, seen = self._clock.monotonic_s(), self._seen.get(name)
        dead = seen.beat if seen is not None and now - seen.since_s >= ttl_s else b""
        answer = await self._redis.script(
            _ACQUIRE,
            [keys.lease(name), keys.LEASE_EPOCHS, keys.INCARNATION],
            [
                name,
                holder,
                redis_ttl_ms(ttl_s),
                dead,
                beyond.incarnation,
                beyond.epoch,
                beyond.next_incarnation(self._clock.wall_s()),
            ],
        )
        if isinstance(answer, list):
            self._seen.pop(name, None)
            return Fence(answer[0].decode(), answer[1])
        if seen is None or seen.beat != answer:
            # Counted from the reply, not the request: a late reply may follow a recent renewal.
            self._seen[name] = _Seen(answer, self._clock.monotonic_s())
        return None

    async def release_lease(self, name: str, holder: str) -> None:
        await self._redis.script(_RELEASE, [keys.lease(name)], [holder])
