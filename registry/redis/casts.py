"""Casts in Redis: their records and the progress of each node."""

from collections.abc import Iterator, Mapping

from registry import keys
from registry.codec import decode, encode
from registry.records.cast import CastDetails, CastProgress, CastRecord, CastStatus, latest_first
from registry.records.change import CastChanged, CastPartEnded
from registry.redis.connections import LuaScript
from registry.redis.store import RedisStore, change_script

# Publish a cast unless the same or a later epoch is known. Each call also removes a few ids of expired casts,
# so that their number stays in proportion to that of the existing ones.
# KEYS feed casts cast; ARGV length id epoch record ttl-s change cast-prefix
_PUT_CAST = change_script("""
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
""")

# Store a node's progress unless a later one is known. It may arrive before the cast itself.
# Only final progress is a change for the feed; otherwise `change` is ''.
# KEYS feed cast; ARGV length node epoch at progress details ttl-s change
_PUT_PROGRESS = change_script("""
local known = redis.call('HMGET', KEYS[2], 'part ' .. ARGV[2], 'at ' .. ARGV[2])
local newer = tonumber(ARGV[3]) - (tonumber(known[1]) or -1)
if newer < 0 or (newer == 0 and tonumber(ARGV[4]) < tonumber(known[2])) then return 0 end
redis.call('HSET', KEYS[2], 'part ' .. ARGV[2], ARGV[3], 'at ' .. ARGV[2], ARGV[4],
  'node ' .. ARGV[2], ARGV[5], 'more ' .. ARGV[2], ARGV[6])
redis.call('EXPIRE', KEYS[2], ARGV[7])
if ARGV[8] ~= '' then publish('CastPartEnded', ARGV[8]) end
return 1
""")

_READ_BATCH = 512  # parts read by one command

# Drop the id of a cast that has expired.
# KEYS casts cast; ARGV id
_REMOVE_EXPIRED = LuaScript(
    "if redis.call('EXISTS', KEYS[2]) == 0 then redis.call('SREM', KEYS[1], ARGV[1]) end"
)


class RedisCasts(RedisStore):
    """Casts and the progress of their nodes."""

    async def put_cast(self, record: CastRecord) -> None:
        await self._change(
            _PUT_CAST,
            [keys.CASTS, keys.cast(record.cast_id)],
            record.cast_id,
            record.epoch,
            encode(record),
            keys.CAST_TTL_S,
            encode(CastChanged(record=record)),
            keys.CAST_PREFIX,
        )

    async def put_cast_progress(self, progress: CastProgress) -> None:
        await self._change(
            _PUT_PROGRESS,
            [keys.cast(progress.cast_id)],
            progress.node,
            progress.epoch,
            repr(progress.updated_at),
            encode(progress.brief),
            encode(progress.details),
            keys.CAST_TTL_S,
            encode(CastPartEnded(progress=progress)) if progress.is_final else "",
        )

    async def casts(
        self, prefix: str = "", *, function: str | None = None, brief: bool = False
    ) -> list[CastStatus]:
        # Casts are read one by one: with a thousand nodes each, one large read would block Redis and this
        # loop.
        ids = [raw.decode() for raw in await self._redis.call("SMEMBERS", keys.CASTS)]
        found: list[CastRecord] = []
        for cast_id in ids:
            if not cast_id.startswith(prefix):
                continue
            key = keys.cast(cast_id)
            raw = await self._redis.call("HGET", key, "record")
            if raw is None:
                await self._redis.script(_REMOVE_EXPIRED, [keys.CASTS, key], [cast_id])
                continue
            record = decode(CastRecord, raw, key)
            if function in (None, record.function):
                found.append(record)
        return [
            CastStatus(record=record, progress=await self._progress_of(record, brief))
            for record in latest_first(found)
        ]

    async def _progress_of(self, record: CastRecord, brief: bool) -> tuple[CastProgress, ...]:
        """Return the progress of nodes, by node; if `brief`, of members only and without details."""
        key = keys.cast(record.cast_id)
        if not brief:
            flat = await self._redis.call("HGETALL", key)
            return tuple(_whole(dict(zip(flat[::2], flat[1::2], strict=True)), key))
        fields = [f"node {node}" for node in sorted(member.node for member in record.members)]
        progress: list[CastProgress] = []
        for begin in range(0, len(fields), _READ_BATCH):
            raw = await self._redis.call("HMGET", key, *fields[begin : begin + _READ_BATCH])
            progress += [decode(CastProgress, one, key) for one in raw if one is not None]
        return tuple(progress)


def _whole(fields: Mapping[bytes, bytes], key: str) -> Iterator[CastProgress]:
    for name in sorted(name for name in fields if name.startswith(b"node ")):
        progress = decode(CastProgress, fields[name], key)
        details = fields.get(b"more " + name.removeprefix(b"node "))
        yield progress if details is None else progress.with_details(decode(CastDetails, details, key))
