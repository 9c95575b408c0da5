"""Files and batches in Redis: each change is one script."""

from collections.abc import Sequence
from typing import Any

from registry import keys
from registry.codec import decode, encode
from registry.errors import NotFound
from registry.records.batch import BatchCounts, BatchRecord, FileRecord
from registry.records.job import JobBounds, JobSpec, LineResult, Submission
from registry.redis.connections import LuaScript
from registry.redis.jobs import JOBS, batch_counts
from registry.redis.store import WRITE_WHEN_FULL, RedisStore

_STEP = 100  # files and batches that one sweep removes

_FILES = (
    JOBS
    + f"""
local FILES, FILES_OF, FILES_BY_EXPIRY = '{keys.FILES}', '{keys.FILES_OF_PREFIX}', '{keys.FILES_BY_EXPIRY}'
local BATCHES, BATCHES_OF = '{keys.BATCHES}', '{keys.BATCHES_OF_PREFIX}'
local OPEN, BATCHES_BY_EXPIRY = '{keys.BATCHES_OPEN}', '{keys.BATCHES_BY_EXPIRY}'
local function size(record)
  local bytes = 0
  for _, part in ipairs(record.parts) do bytes = bytes + part.size end
  return bytes
end
local function put_file(raw)
  local file = cjson.decode(raw)
  if redis.call('HSETNX', FILES, file.id, raw) == 0 then return end
  redis.call('ZADD', FILES_OF .. file.tenant, file.created_at, file.id)
  redis.call('ZADD', FILES_BY_EXPIRY, file.expires_at, file.id)
  count('files', file.tenant, 1)
  count('file-bytes', file.tenant, size(file))
end
local function drop_file(id)
  local raw = redis.call('HGET', FILES, id)
  redis.call('ZREM', FILES_BY_EXPIRY, id)
  if not raw then return end
  local file = cjson.decode(raw)
  redis.call('HDEL', FILES, id)
  redis.call('ZREM', FILES_OF .. file.tenant, id)
  count('files', file.tenant, -1)
  count('file-bytes', file.tenant, 0 - size(file))  -- not -0, which is no integer to Redis
end
"""
)

# ARGV id tenant record bytes max-files max-bytes
_PUT_FILE = LuaScript(
    _FILES
    + """
if redis.call('HEXISTS', FILES, ARGV[1]) == 1 then return 'exists' end
local full = beyond('files', ARGV[2], 1, ARGV[5]) or beyond('file-bytes', ARGV[2], ARGV[4], ARGV[6])
if full then return full end
put_file(ARGV[3])
return 'queued'
"""
)

# ARGV id
_DELETE_FILE = LuaScript(WRITE_WHEN_FULL + _FILES + "drop_file(ARGV[1]) return 1")

# ARGV now step
_SWEEP = LuaScript(
    WRITE_WHEN_FULL
    + _FILES
    + """
local files = redis.call('ZRANGEBYSCORE', FILES_BY_EXPIRY, '-inf', ARGV[1], 'LIMIT', 0, ARGV[2])
for _, id in ipairs(files) do drop_file(id) end
local removed = #files
for _, id in ipairs(redis.call('ZRANGEBYSCORE', BATCHES_BY_EXPIRY, '-inf', ARGV[1], 'LIMIT', 0, ARGV[2])) do
  if redis.call('ZSCORE', HOOKS, id) then
    redis.call('ZADD', BATCHES_BY_EXPIRY, ARGV[1] + 60, id)
  else
    redis.call('ZREM', BATCHES_BY_EXPIRY, id)
    local raw = redis.call('HGET', BATCHES, id)
    if raw then
      local batch = cjson.decode(raw)
      redis.call('HDEL', BATCHES, id)
      redis.call('DEL', BATCH .. id)
      redis.call('ZREM', BATCHES_OF .. batch.tenant, id)
      count('batches', batch.tenant, -1)
      shift('batch', batch.status or 'validating', nil)
    end
    removed = removed + 1
  end
end
return removed
"""
)

# ARGV id tenant record created-at max-batches webhook status
_PUT_BATCH = LuaScript(
    _FILES
    + """
if redis.call('HEXISTS', BATCHES, ARGV[1]) == 1 then return 'exists' end
local full = beyond('batches', ARGV[2], 1, ARGV[5])
if full then return full end
redis.call('HSET', BATCHES, ARGV[1], ARGV[3])
redis.call('ZADD', BATCHES_OF .. ARGV[2], ARGV[4], ARGV[1])
redis.call('SADD', OPEN, ARGV[1])
count('batches', ARGV[2], 1)
shift('batch', nil, ARGV[7])
if ARGV[6] ~= '' then redis.call('HSET', BATCH .. ARGV[1], 'tenant', ARGV[2], 'hook', 'waiting') end
event('batch', ARGV[1])
return 'queued'
"""
)

# ARGV id tenant before after taken removed-at ("" while it is open) max-jobs max-bytes line-bytes
#      status-before status-after number-of-files file* (job-id record body)*
_REPLACE = LuaScript(
    _FILES
    + """
local id, tenant, taken, files = ARGV[1], ARGV[2], tonumber(ARGV[5]), tonumber(ARGV[12])
if redis.call('HGET', BATCHES, id) ~= ARGV[3] then return 'exists' end
local lines = (#ARGV - 12 - files) / 3
if lines > 0 then
  local full = beyond('jobs', tenant, lines, ARGV[7]) or beyond('bytes', tenant, ARGV[9], ARGV[8])
  if full then return full end
end
redis.call('HSET', BATCHES, id, ARGV[4])
shift('batch', ARGV[10], ARGV[11])
for i = 13, 12 + files do put_file(ARGV[i]) end
for i = 13 + files, #ARGV, 3 do add(ARGV[i], tenant, ARGV[i + 1], ARGV[i + 2], '', id, 1) end
if lines > 0 then event('queued', id) end
if taken > 0 then
  local bytes = 0
  for _, line in ipairs(redis.call('LRANGE', RESULTS .. id, 0, taken - 1)) do bytes = bytes + #line end
  redis.call('LTRIM', RESULTS .. id, taken, -1)
  redis.call('HINCRBY', BATCH .. id, 'waiting', -taken)
  redis.call('HINCRBY', BATCH .. id, 'waiting_bytes', -bytes)
end
if ARGV[6] ~= '' then
  redis.call('SREM', OPEN, id)
  redis.call('ZADD', BATCHES_BY_EXPIRY, ARGV[6], id)
  redis.call('DEL', RESULTS .. id, LINES .. id)
  if redis.call('HEXISTS', BATCH .. id, 'hook') == 1 then
    redis.call('ZADD', HOOKS, text(now), id)
    event('hook', id)
  end
end
event('batch', id)
return 'queued'
"""
)

# A record and its counts together. ARGV batch-prefix id*
_READ = LuaScript(f"""
local found = {{}}
for i = 2, #ARGV do
  local beside = redis.call('HGETALL', ARGV[1] .. ARGV[i])
  found[#found + 1] = {{redis.call('HGET', '{keys.BATCHES}', ARGV[i]), beside}}
end
return found
""")


class RedisBatches(RedisStore):
    """Files of tenants, and batches."""

    async def put_file(self, record: FileRecord, *, files: int, file_bytes: int) -> Submission:
        outcome = await self._redis.script(
            _PUT_FILE, [], [record.id, record.tenant, encode(record), record.size, files, file_bytes]
        )
        return Submission(outcome.decode())

    async def file(self, file_id: str) -> FileRecord:
        raw = await self._redis.call("HGET", keys.FILES, file_id)
        if raw is None:
            raise NotFound(f"no file {file_id}")
        return decode(FileRecord, raw, keys.FILES)

    async def files(self, tenant: str) -> list[FileRecord]:
        ids = await self._redis.call("ZREVRANGE", keys.files_of(tenant), 0, -1)
        raws = await self._redis.call("HMGET", keys.FILES, *ids) if ids else []
        return [decode(FileRecord, raw, keys.FILES) for raw in raws if raw is not None]

    async def delete_file(self, file_id: str) -> None:
        await self._redis.script(_DELETE_FILE, [], [file_id])

    async def file_digests(self) -> frozenset[str]:
        # Batches first: the parts of one that ends meanwhile are in a file then.
        open_ = await self._read(await self.open_batches())
        raws = await self._redis.call("HVALS", keys.FILES)
        parts = [part for record, _ in open_ for part in (*record.output, *record.errors)]
        for raw in raws:
            parts += decode(FileRecord, raw, keys.FILES).parts
        return frozenset([part.digest for part in parts])

    async def sweep_files(self, now: float) -> int:
        removed: int = await self._redis.script(_SWEEP, [], [repr(now), _STEP])
        return removed

    async def put_batch(self, record: BatchRecord, *, batches: int) -> Submission:
        outcome = await self._redis.script(
            _PUT_BATCH,
            [],
            [
                *(record.id, record.tenant, encode(record), repr(record.created_at), batches),
                *(record.webhook, record.status.value),
            ],
            replicated=True,
        )
        return Submission(outcome.decode())

    async def batch(self, batch_id: str) -> tuple[BatchRecord, BatchCounts]:
        found = await self._read([batch_id])
        if not found:
            raise NotFound(f"no batch {batch_id}")
        return found[0]

    async def batches(self, tenant: str) -> list[tuple[BatchRecord, BatchCounts]]:
        return await self._read(await self._redis.call("ZREVRANGE", keys.batches_of(tenant), 0, -1))

    async def open_batches(self) -> list[str]:
        return sorted(id_.decode() for id_ in await self._redis.call("SMEMBERS", keys.BATCHES_OPEN))

    async def batch_lines(self, batch_id: str) -> list[str]:
        return sorted(id_.decode() for id_ in await self._redis.call("SMEMBERS", keys.batch_lines(batch_id)))

    async def batch_results(self, batch_id: str, limit: int) -> list[LineResult]:
        raws = await self._redis.call("LRANGE", keys.batch_results(batch_id), 0, limit - 1)
        return [decode(LineResult, raw, keys.BATCH_RESULTS_PREFIX) for raw in raws]

    async def replace_batch(
        self,
        before: BatchRecord,
        after: BatchRecord,
        *,
        lines: Sequence[tuple[JobSpec, bytes]] = (),
        taken: int = 0,
        files: Sequence[FileRecord] = (),
        keep_s: float = 0.0,
        bounds: JobBounds | None = None,
    ) -> Submission:
        bounds = bounds or JobBounds()
        removed_at = repr(after.times.get(after.status, 0.0) + keep_s) if after.status.is_final else ""
        jobs: list[str | bytes] = []
        for spec, body in lines:
            jobs += (spec.id, encode(spec), body)
        outcome = await self._redis.script(
            _REPLACE,
            [],
            [
                *(before.id, before.tenant, encode(before), encode(after), taken, removed_at),
                *(bounds.jobs, bounds.job_bytes, sum(len(body) for _, body in lines)),
                *(before.status.value, after.status.value, len(files)),
                *[encode(file) for file in files],
                *jobs,
            ],
            replicated=True,
        )
        return Submission(outcome.decode())

    async def _read(self, ids: Sequence[Any]) -> list[tuple[BatchRecord, BatchCounts]]:
        if not ids:
            return []
        found = await self._redis.script(_READ, [], [keys.BATCH_PREFIX, *ids])
        return [
            (
                decode(BatchRecord, raw, keys.BATCHES),
                batch_counts(dict(zip(fields[::2], fields[1::2], strict=True))),
            )
            for raw, fields in found
            if raw is not None
        ]
