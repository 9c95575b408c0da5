"""Quotas in Redis: one script a request of a limited key, by Redis' own clock.

A request's tokens and its price are counted by the ledger's script, together with its record.
"""

from collections.abc import Sequence

from registry import keys
from registry.api_key import ApiKey, SpendPeriod
from registry.quota import LONGEST_PLACE_S, UNITS, Place, Standing, Verdict, spend_field
from registry.redis_connections import Script
from registry.redis_store import RedisStore, milliseconds

# Judge (registry/quota.py) and, if the request is admitted, count it and give it a place. A repetition
# finds its place and counts nothing. The places of gateways that died lapse by their scores.
# A bucket from a time when Redis' clock was ahead drains from now on, and a place lapses soon. When the
# clock jumps ahead all places lapse, until their gateways keep them again (gateway/places.py: in 5 s).
# KEYS bucket places spend
# ARGV place ttl-ms units requests-limit tokens-limit places-limit (0: none) spend-limit (-1: none)
#      spend-field bucket-ttl-s longest-place-ms
_ADMIT = Script(
    """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local units = tonumber(ARGV[3])
local requests_limit, tokens_limit = tonumber(ARGV[4]), tonumber(ARGV[5])
local places_limit, spend_limit = tonumber(ARGV[6]), tonumber(ARGV[7])

local bucket = redis.call('HMGET', KEYS[1], 'at', 'requests', 'tokens')
local elapsed = now - (bucket[1] or now)
if elapsed < 0 then
  redis.call('HSET', KEYS[1], 'at', string.format('%.0f', now))
  elapsed = 0
end
local requests = math.max(0, (bucket[2] or 0) - elapsed * requests_limit)
local tokens = math.max(0, (bucket[3] or 0) - elapsed * tokens_limit)
local spent = tonumber(redis.call('HGET', KEYS[3], ARGV[8]) or 0)
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
local latest = now + math.max(tonumber(ARGV[2]), tonumber(ARGV[10]))
local beyond = redis.call('ZRANGEBYSCORE', KEYS[2], string.format('(%.0f', latest), '+inf')
for _, place in ipairs(beyond) do redis.call('ZADD', KEYS[2], latest, place) end
local places = redis.call('ZCARD', KEYS[2])

local verdict = 'admitted'
if not redis.call('ZSCORE', KEYS[2], ARGV[1]) then
  if spend_limit >= 0 and spent >= spend_limit then verdict = 'spent'
  elseif places_limit > 0 and places >= places_limit then verdict = 'busy'
  elseif requests_limit > 0 and requests + units > requests_limit * units then verdict = 'requests'
  elseif tokens_limit > 0 and tokens >= tokens_limit * units then verdict = 'tokens'
  else
    redis.call('ZADD', KEYS[2], now + ARGV[2], ARGV[1])
    redis.call('PEXPIRE', KEYS[2], ARGV[2])
    places = places + 1
    if requests_limit > 0 then requests = requests + units end
    if requests_limit > 0 or tokens_limit > 0 then
      -- Lua would write a large number with an exponent, which HINCRBY does not take.
      redis.call('HSET', KEYS[1], 'at', string.format('%.0f', now),
        'requests', string.format('%.0f', requests), 'tokens', string.format('%.0f', tokens))
      if tokens_limit == 0 then redis.call('HDEL', KEYS[1], 'tokens') end
      redis.call('EXPIRE', KEYS[1], ARGV[9])
    end
  end
end
return {verdict, requests, tokens, places, spent}
"""
)

# KEYS places*; ARGV ttl-ms place*
_KEEP = Script(
    """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for i, places in ipairs(KEYS) do
  redis.call('ZADD', places, now + ARGV[1], ARGV[i + 1])
  redis.call('PEXPIRE', places, ARGV[1])
end
"""
)

# Places of one call.
_BATCH = 1000


class RedisQuotas(RedisStore):
    async def admit(self, key: ApiKey, place: str, *, ttl_s: float, now: float) -> Standing:
        verdict, requests, tokens, places, spent = await self._redis.script(
            _ADMIT,
            [keys.bucket(key.id), keys.places(key.id), keys.spend(key.id)],
            [
                place,
                milliseconds(ttl_s),
                UNITS,
                key.requests_per_minute or 0,
                key.tokens_per_minute or 0,
                key.max_concurrent or 0,
                -1 if key.spend_limit_nanos is None else key.spend_limit_nanos,
                spend_field(key.spend_period, now),
                keys.BUCKET_TTL_S,
                milliseconds(LONGEST_PLACE_S),
            ],
        )
        return Standing(
            verdict=Verdict(verdict.decode()),
            requests_used=requests,
            tokens_used=tokens,
            places=places,
            spent_nanos=spent,
        )

    async def keep_places(self, places: Sequence[Place], *, ttl_s: float) -> None:
        for first in range(0, len(places), _BATCH):
            batch = places[first : first + _BATCH]
            await self._redis.script(
                _KEEP,
                [keys.places(place.key_id) for place in batch],
                [milliseconds(ttl_s), *(place.id for place in batch)],
            )

    async def release_places(self, places: Sequence[Place]) -> None:
        for first in range(0, len(places), _BATCH):
            batch = places[first : first + _BATCH]
            await self._redis.run(*(("ZREM", keys.places(place.key_id), place.id) for place in batch))

    async def spent_nanos(self, key_id: str, period: SpendPeriod, now: float) -> int:
        return int(await self._redis.call("HGET", keys.spend(key_id), spend_field(period, now)) or 0)
