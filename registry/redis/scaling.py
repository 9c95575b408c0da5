"""The last scaling decisions in Redis."""

from registry import keys
from registry.codec import decode, encode
from registry.records.scaling import ScalingRecord
from registry.redis.store import RedisStore


class RedisScaling(RedisStore):
    """The last scaling decision of each function."""

    async def put_scaling_record(self, record: ScalingRecord) -> None:
        key = keys.scaling(record.function)
        await self._redis.call("SET", key, encode(record), "EX", keys.SCALING_TTL_S)

    async def scaling_record(self, function: str) -> ScalingRecord | None:
        key = keys.scaling(function)
        raw = await self._redis.call("GET", key)
        return None if raw is None else decode(ScalingRecord, raw, key)
