"""Casts in Redis: what was planned, and what each node tells of its part."""

from collections.abc import Iterator, Mapping

from registry import keys
from registry.cast import CastDetails, CastProgress, CastRecord, CastStatus, in_order
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
# KEYS feed cast; ARGV length node epoch at progress details ttl-s change
_PUT_PROGRESS = Script(
    PUBLISH
    + """
local known = redis.call('HMGET', KEYS[2], 'part ' .. ARGV[2], 'at ' .. ARGV[2])
local newer = tonumber(ARGV[3]) - (tonumber(known[1]) or -1)
if newer < 0 or (newer == 0 and tonumber(ARGV[4]) < tonumber(known[2])) then return 0 end
redis.call('HSET', KEYS[2], 'part ' .. ARGV[2], ARGV[3], 'at ' .. ARGV[2], ARGV[4],
  'node ' .. ARGV[2], ARGV[5], 'more ' .. ARGV[2], ARGV[6])
redis.call('EXPIRE', KEYS[2], ARGV[7])
if ARGV[8] ~= '' then publish('CastPartEnded', ARGV[8]) end
return 1
"""
)

_AT_ONCE = 512  # parts are read together

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
                progress.epoch,
                repr(progress.updated_at),
                encode(progress.brief),
                encode(progress.details),
                keys.CAST_TTL_S,
                encode(CastPartEnded(progress=progress)) if progress.is_final else "",
            ],
        )

    async def casts(
        self, beginning: str = "", *, function: str | None = None, brief: bool = False
    ) -> list[CastStatus]:
        """Read one after the other: of a thousand nodes each, all at once would hold up whatever else Redis
        and this process do."""
        ids = [raw.decode() for raw in await self._redis.call("SMEMBERS", keys.CASTS)]
        found: list[CastRecord] = []
        for cast_id in ids:
            if not cast_id.startswith(beginning):
                continue
            key = keys.cast(cast_id)
            raw = await self._redis.call("HGET", key, "record")
            if raw is None:
                await self._redis.script(_FORGET, [keys.CASTS, key], [cast_id])
                continue
            record = decode(CastRecord, raw, key)
            if function in (None, record.function):
                found.append(record)
        return [
            CastStatus(record=record, progress=await self._told(record, brief)) for record in in_order(found)
        ]

    async def _told(self, record: CastRecord, brief: bool) -> tuple[CastProgress, ...]:
        """What nodes told of their parts, by node; if `brief`, only the members, and without details."""
        key = keys.cast(record.cast_id)
        if not brief:
            flat = await self._redis.call("HGETALL", key)
            return tuple(_whole(dict(zip(flat[::2], flat[1::2], strict=True)), key))
        fields = [f"node {node}" for node in sorted(member.node for member in record.members)]
        told: list[CastProgress] = []
        for begin in range(0, len(fields), _AT_ONCE):
            raw = await self._redis.call("HMGET", key, *fields[begin : begin + _AT_ONCE])
            told += [decode(CastProgress, one, key) for one in raw if one is not None]
        return tuple(told)


def _whole(fields: Mapping[bytes, bytes], key: str) -> Iterator[CastProgress]:
    for name in sorted(name for name in fields if name.startswith(b"node ")):
        progress = decode(CastProgress, fields[name], key)
        details = fields.get(b"more " + name.removeprefix(b"node "))
        yield progress if details is None else progress.with_details(decode(CastDetails, details, key))
