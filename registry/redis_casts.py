"""Casts in Redis: what was planned, and what each node tells of its part."""

from collections.abc import Mapping

from registry import keys
from registry.cast import CastProgress, CastRecord, CastStatus, in_order
from registry.change import CastChanged, CastPartEnded
from registry.codec import decode, encode
from registry.redis_connections import Script
from registry.redis_store import PUBLISH, RedisStore

# Publish a cast, unless no earlier epoch of it is known. With each one that is published some ids of
# expired ones go, so that what is left of these stays in proportion to the casts that there are.
# KEYS feed casts cast; ARGV length id epoch record ttl-s change cast-prefix
_PUT_CAST = Script(
    PUBLISH
    + """
local known = redis.call('HGET', KEYS[3], 'epoch')
if known and tonumber(ARGV[3]) <= tonumber(known) then return 0 end
redis.call('HSET', KEYS[3], 'epoch', ARGV[3], 'record', ARGV[4])
redis.call('EXPIRE', KEYS[3], ARGV[5])
redis.call('SADD', KEYS[2], ARGV[2])
for _, id in ipairs(redis.call('SRANDMEMBER', KEYS[2], 4)) do
  if redis.call('EXISTS', ARGV[7] .. id) == 0 then redis.call('SREM', KEYS[2], id) end
end
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

# Drop the id of a cast that has expired.
# KEYS casts cast; ARGV id
_FORGET = Script("if redis.call('EXISTS', KEYS[2]) == 0 then redis.call('SREM', KEYS[1], ARGV[1]) end")


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
                keys.CAST_PREFIX,
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

    async def casts(self, beginning: str = "") -> list[CastStatus]:
        """Read one after the other: of a thousand nodes each, all at once would hold up whatever else Redis
        and this process do."""
        ids = [raw.decode() for raw in await self._redis.call("SMEMBERS", keys.CASTS)]
        found: dict[str, CastStatus] = {}
        for cast_id in ids:
            if not cast_id.startswith(beginning):
                continue
            key = keys.cast(cast_id)
            flat = await self._redis.call("HGETALL", key)
            status = _status(dict(zip(flat[::2], flat[1::2], strict=True)), key)
            if status is not None:
                found[cast_id] = status
            else:
                await self._redis.script(_FORGET, [keys.CASTS, key], [cast_id])
        return [found[record.cast_id] for record in in_order(one.record for one in found.values())]


def _status(fields: Mapping[bytes, bytes], key: str) -> CastStatus | None:
    if b"record" not in fields:
        return None
    told = [decode(CastProgress, raw, key) for field, raw in fields.items() if field.startswith(b"node ")]
    told.sort(key=lambda one: one.node)
    return CastStatus(record=decode(CastRecord, fields[b"record"], key), progress=tuple(told))
