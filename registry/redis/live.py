"""Live serving records in Redis."""

from registry import keys
from registry.codec import encode
from registry.records.change import LiveChanged
from registry.records.live import LiveRecord
from registry.redis.store import RedisStore, change_script, redis_ttl_ms

# Publish a live record unless it is older than the known one, by controller epoch and serial.
# KEYS feed lives live; ARGV length version epoch serial record ttl-ms change
_PUT_LIVE = change_script("""
local known = redis.call('HMGET', KEYS[3], 'epoch', 'serial')
if known[1] then
  local epoch, serial = tonumber(known[1]), tonumber(known[2])
  if tonumber(ARGV[3]) < epoch then return 0 end
  if tonumber(ARGV[3]) == epoch and tonumber(ARGV[4]) < serial then return 0 end
end
redis.call('HSET', KEYS[3], 'epoch', ARGV[3], 'serial', ARGV[4], 'record', ARGV[5], 'ttl', ARGV[6])
redis.call('PEXPIRE', KEYS[3], ARGV[6])
redis.call('SADD', KEYS[2], ARGV[2])
publish('LiveChanged', ARGV[7])
return 1
""")


class RedisLive(RedisStore):
    """Live serving records of function versions."""

    async def put_live(self, record: LiveRecord, ttl_s: float) -> None:
        await self._change(
            _PUT_LIVE,
            [keys.LIVES, keys.live(record.function, record.version)],
            keys.version(record.function, record.version),
            record.controller_epoch,
            record.serial,
            encode(record),
            redis_ttl_ms(ttl_s),
            encode(LiveChanged(record=record, ttl_s=ttl_s)),
        )
