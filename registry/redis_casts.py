"""Casts in Redis: what was planned, and what each node tells of its part."""

from registry import keys
from registry.cast import CastProgress, CastRecord, CastStatus, in_order
from registry.change import CastChanged, CastPartEnded
from registry.codec import decode, encode
from registry.redis_connections import Script
from registry.redis_store import PUBLISH, RedisStore

# Publish a cast, unless no earlier epoch of it is known.
# KEYS feed casts cast; ARGV length id epoch record ttl-s change
_PUT_CAST = Script(
    PUBLISH
    + """
local known = redis.call('HGET', KEYS[3], 'epoch')
if known and tonumber(ARGV[3]) <= tonumber(known) then return 0 end
redis.call('HSET', KEYS[3], 'epoch', ARGV[3], 'record', ARGV[4])
redis.call('EXPIRE', KEYS[3], ARGV[5])
redis.call('SADD', KEYS[2], ARGV[2])
publish('CastChanged', ARGV[6])
return 1
"""
)

# What a node tells of its part, unless it told something later. It may come before the cast itself does.
# Only a last word is a change for the feed; else that is ''.
# KEYS feed cast; ARGV length node at progress ttl-s change
_PUT_PROGRESS = Script(
    PUBLISH
    + """
local known = redis.call('HGET', KEYS[2], 'at ' .. ARGV[2])
if known and tonumber(ARGV[3]) < tonumber(known) then return 0 end
redis.call('HSET', KEYS[2], 'node ' .. ARGV[2], ARGV[4], 'at ' .. ARGV[2], ARGV[3])
redis.call('EXPIRE', KEYS[2], ARGV[5])
if ARGV[6] ~= '' then publish('CastPartEnded', ARGV[6]) end
return 1
"""
)

# All casts with what their nodes told. Ids of expired ones are dropped on the way.
# KEYS casts; ARGV cast-prefix
_CASTS = Script(
    """
local found = {}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local record = redis.call('HGET', ARGV[1] .. id, 'record')
  if record then
    local row = {record}
    local fields = redis.call('HGETALL', ARGV[1] .. id)
    for i = 1, #fields, 2 do
      if string.sub(fields[i], 1, 5) == 'node ' then row[#row + 1] = fields[i + 1] end
    end
    found[#found + 1] = row
  else
    redis.call('SREM', KEYS[1], id)
  end
end
return found
"""
)


class RedisCasts(RedisStore):
    async def put_cast(self, record: CastRecord) -> None:
        await self._redis.script(
            _PUT_CAST,
            [keys.FEED, keys.CASTS, keys.cast(record.cast_id)],
            [
                self._feed_length,
                record.cast_id,
                record.epoch,
                encode(record),
                keys.CAST_TTL_S,
                encode(CastChanged(record=record)),
            ],
        )

    async def put_cast_progress(self, progress: CastProgress) -> None:
        await self._redis.script(
            _PUT_PROGRESS,
            [keys.FEED, keys.cast(progress.cast_id)],
            [
                self._feed_length,
                progress.node,
                repr(progress.updated_at),
                encode(progress),
                keys.CAST_TTL_S,
                encode(CastPartEnded(progress=progress)) if progress.is_final else "",
            ],
        )

    async def casts(self) -> list[CastStatus]:
        rows = await self._redis.script(_CASTS, [keys.CASTS], [keys.CAST_PREFIX])
        found = {}
        for raw, *told in rows:
            record = decode(CastRecord, raw, keys.CAST_PREFIX)
            progress = [decode(CastProgress, one, keys.cast(record.cast_id)) for one in told]
            progress.sort(key=lambda one: one.node)
            found[record.cast_id] = CastStatus(record=record, progress=tuple(progress))
        return [found[record.cast_id] for record in in_order(one.record for one in found.values())]
