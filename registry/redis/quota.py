"""Quotas in Redis: one script call per request of a limited key, by the clock of Redis.

The script of the ledger counts a request's tokens and cost, together with its record.
"""

from collections.abc import Sequence

from registry import keys
from registry.records.api_key import ApiKey, SpendPeriod
from registry.records.quota import (
    MAX_CONCURRENCY_LEASE_S,
    UNITS,
    ConcurrencyLease,
    RateLimitDecision,
    RateLimitOutcome,
    spend_field,
)
from registry.redis.connections import LuaScript
from registry.redis.store import WRITE_WHEN_FULL, RedisStore, redis_ttl_ms

# Check the limits (`registry.records.quota.judge`); count an admitted request and store its lease. A
# repetition finds its lease and counts nothing. Leases of dead gateways expire by their scores. A bucket
# written while the clock was ahead drains from now on, and a lease written then expires soon. When the clock
# jumps ahead all leases expire, until their gateways renew them (within 5 s).
# KEYS bucket leases spend
# ARGV lease ttl-ms units requests-limit tokens-limit concurrency-limit (0: none) spend-limit (-1: none)
#      spend-field bucket-ttl-s max-lease-ms
_ADMIT = LuaScript("""
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local units = tonumber(ARGV[3])
local requests_limit, tokens_limit = tonumber(ARGV[4]), tonumber(ARGV[5])
local concurrency_limit, spend_limit = tonumber(ARGV[6]), tonumber(ARGV[7])

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
for _, lease in ipairs(beyond) do redis.call('ZADD', KEYS[2], latest, lease) end
local concurrent = redis.call('ZCARD', KEYS[2])

local outcome = 'admitted'
if not redis.call('ZSCORE', KEYS[2], ARGV[1]) then
  if spend_limit >= 0 and spent >= spend_limit then outcome = 'spent'
  elseif concurrency_limit > 0 and concurrent >= concurrency_limit then outcome = 'busy'
  elseif requests_limit > 0 and requests + units > requests_limit * units then outcome = 'requests'
  elseif tokens_limit > 0 and tokens >= tokens_limit * units then outcome = 'tokens'
  else
    redis.call('ZADD', KEYS[2], now + ARGV[2], ARGV[1])
    redis.call('PEXPIRE', KEYS[2], ARGV[2])
    concurrent = concurrent + 1
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
return {outcome, requests, tokens, concurrent, spent}
""")

# Add up what is spent and the reservations of the other leases; those of leases that have ended are removed.
# KEYS leases reserved spend; ARGV lease nanos limit spend-field ttl-s
_RESERVE = LuaScript("""
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local used = tonumber(redis.call('HGET', KEYS[3], ARGV[4]) or 0)
local reserved = redis.call('HGETALL', KEYS[2])
for i = 1, #reserved, 2 do
  local expiry = redis.call('ZSCORE', KEYS[1], reserved[i])
  if not expiry or tonumber(expiry) <= now then redis.call('HDEL', KEYS[2], reserved[i])
  elseif reserved[i] ~= ARGV[1] then used = used + reserved[i + 1] end
end
if used >= tonumber(ARGV[3]) then return 0 end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
redis.call('EXPIRE', KEYS[2], ARGV[5])
return 1
""")

# KEYS leases*; ARGV ttl-ms lease*
_RENEW = LuaScript(
    WRITE_WHEN_FULL
    + """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for i, leases in ipairs(KEYS) do
  redis.call('ZADD', leases, now + ARGV[1], ARGV[i + 1])
  redis.call('PEXPIRE', leases, ARGV[1])
end
"""
)

# Leases of one script call.
_BATCH = 1000


class RedisQuotas(RedisStore):
    """Rate limits, concurrency leases and spending of keys."""

    async def admit(self, key: ApiKey, lease_id: str, *, ttl_s: float, now: float) -> RateLimitDecision:
        outcome, requests, tokens, concurrent, spent = await self._redis.script(
            _ADMIT,
            [keys.bucket(key.id), keys.concurrency(key.id), keys.spend(key.id)],
            [
                lease_id,
                redis_ttl_ms(ttl_s),
                UNITS,
                key.requests_per_minute or 0,
                key.tokens_per_minute or 0,
                key.max_concurrent or 0,
                -1 if key.spend_limit_nanos is None else key.spend_limit_nanos,
                spend_field(key.spend_period, now),
                keys.BUCKET_TTL_S,
                redis_ttl_ms(MAX_CONCURRENCY_LEASE_S),
            ],
        )
        return RateLimitDecision(
            outcome=RateLimitOutcome(outcome.decode()),
            requests_used=requests,
            tokens_used=tokens,
            concurrent=concurrent,
            spent_nanos=spent,
        )

    async def reserve(self, key: ApiKey, lease_id: str, nanos: int, *, now: float) -> bool:
        if key.spend_limit_nanos is None:
            return True
        reserved = await self._redis.script(
            _RESERVE,
            [keys.concurrency(key.id), keys.reserved(key.id), keys.spend(key.id)],
            [
                lease_id,
                nanos,
                key.spend_limit_nanos,
                spend_field(key.spend_period, now),
                keys.RESERVED_TTL_S,
            ],
        )
        return bool(reserved)

    async def renew_concurrency_leases(self, leases: Sequence[ConcurrencyLease], *, ttl_s: float) -> None:
        for first in range(0, len(leases), _BATCH):
            batch = leases[first : first + _BATCH]
            await self._redis.script(
                _RENEW,
                [keys.concurrency(lease.key_id) for lease in batch],
                [redis_ttl_ms(ttl_s), *(lease.id for lease in batch)],
            )

    async def release_concurrency_leases(self, leases: Sequence[ConcurrencyLease]) -> None:
        for first in range(0, len(leases), _BATCH):
            batch = leases[first : first + _BATCH]
            await self._redis.run(*(("ZREM", keys.concurrency(lease.key_id), lease.id) for lease in batch))

    async def spent_nanos(self, key_id: str, period: SpendPeriod, now: float) -> int:
        return int(await self._redis.call("HGET", keys.spend(key_id), spend_field(period, now)) or 0)
