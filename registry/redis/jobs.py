"""The queue of jobs in Redis: each change is one script.

A job is a hash: `record` (JobSpec), `body`, `status`, `attempt`, `tenant`, `batch`, `order` (its place in the
queue), `queued_at` (ms), `bytes` (of which its tenant has the account), `lost` (attempts that did not
return), `started_at`, `outcome`, `result`, `bill`, `keep` (ms), `cancelling`, `hook` (status of its webhook),
`tries` of that.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Any

from redis.exceptions import ResponseError

from registry import keys
from registry.codec import decode, encode
from registry.errors import NotFound, StateUnavailable
from registry.records.batch import BatchCounts, BatchRecord, BatchStatus
from registry.records.hook import ClaimedHook, EndedBatch, HookClaims
from registry.records.job import (
    ClaimedJob,
    HookStatus,
    Job,
    JobBounds,
    JobClaims,
    JobEvent,
    JobEventKind,
    JobLease,
    JobOutcome,
    JobSpec,
    JobStatus,
    LeaseRenewal,
    Submission,
)
from registry.records.job_counts import JobCounts
from registry.records.usage import RequestRecord
from registry.redis.connections import LuaScript
from registry.redis.feed import BATCH, BLOCK_S
from registry.redis.store import WRITE_WHEN_FULL, RedisStore, redis_ttl_ms

# Of one script call: jobs that return to their queues, and that are removed.
_STEP = 200
_DUE_HOOKS = 1000  # webhooks that are due among which one script looks

# The parts of all scripts. `enqueue` gives a tenant that had nothing to wait for the present turn. `become`
# alone changes the status of a job, so that the counts are right. `close` ends a job that has its outcome;
# what is kept of a line of a batch is its result, in the batch's list.
JOBS = f"""
local JOB, QUEUE, TURNS = '{keys.JOB_PREFIX}', '{keys.JOB_QUEUE_PREFIX}', '{keys.JOB_TURNS}'
local RUNNING, LATER, ENDED = '{keys.JOBS_RUNNING}', '{keys.JOBS_LATER}', '{keys.JOBS_ENDED}'
local JOBS_OF, QUEUED = '{keys.JOBS_OF_PREFIX}', '{keys.JOBS_QUEUED}'
local STATES = '{keys.JOB_STATES}'
local HOOKS, USAGE, EVENTS = '{keys.JOB_HOOKS}', '{keys.JOB_USAGE}', '{keys.JOB_EVENTS}'
local BATCH, RESULTS = '{keys.BATCH_PREFIX}', '{keys.BATCH_RESULTS_PREFIX}'
local LINES = '{keys.BATCH_LINES_PREFIX}'
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function text(number) return string.format('%.0f', number) end
local function event(kind, id)
  redis.call('XADD', EVENTS, 'MAXLEN', '~', {keys.JOB_EVENTS_LENGTH}, '*', kind, id)
end
local function count(what, tenant, amount)
  redis.call('HINCRBY', USAGE, what, amount)
  if redis.call('HINCRBY', USAGE, what .. ' ' .. tenant, amount) <= 0 then
    redis.call('HDEL', USAGE, what .. ' ' .. tenant)
  end
end
local function beyond(what, tenant, amount, limit)
  amount, limit = tonumber(amount), tonumber(limit)
  local used = redis.call('HMGET', USAGE, what, what .. ' ' .. tenant)
  if (tonumber(used[1]) or 0) + amount > limit then return 'full' end
  if (tonumber(used[2]) or 0) + amount > limit / 2 then return 'tenant-full' end
end
local function shift(kind, from, to)
  if from == to then return end
  if from and redis.call('HINCRBY', STATES, kind .. ' ' .. from, -1) <= 0 then
    redis.call('HDEL', STATES, kind .. ' ' .. from)
  end
  if to then redis.call('HINCRBY', STATES, kind .. ' ' .. to, 1) end
end
local function kind_of(batch) return batch == '' and 'prediction' or 'line' end
local function become(id, status)
  local job = redis.call('HMGET', JOB .. id, 'status', 'batch', 'queued_at')
  shift(kind_of(job[2]), job[1], status)
  redis.call('HSET', JOB .. id, 'status', status)
  if status == 'queued' then
    redis.call('ZADD', QUEUED, job[3], id)
  else
    redis.call('ZREM', QUEUED, id)
  end
end
local function enqueue(id, tenant, order)
  redis.call('ZADD', QUEUE .. tenant, order, id)
  redis.call('ZADD', TURNS, 'NX', redis.call('HGET', USAGE, 'serial') or 0, tenant)
end
-- `kind` 0: before the lines of batches.
local function add(id, tenant, record, body, hook, batch, kind)
  local serial = redis.call('HINCRBY', USAGE, 'jobs-ever', 1)
  local order = text(kind * 1e14 + serial)
  local bytes = #record + #body
  redis.call('HSET', JOB .. id, 'record', record, 'body', body, 'attempt', 0, 'tenant', tenant,
    'batch', batch, 'order', order, 'queued_at', text(now), 'bytes', bytes)
  become(id, 'queued')
  if hook ~= '' then redis.call('HSET', JOB .. id, 'hook', 'waiting') end
  if batch ~= '' then
    redis.call('SADD', LINES .. batch, id)
  else
    redis.call('ZADD', JOBS_OF .. tenant, order, id)
  end
  count('jobs', tenant, 1)
  count('bytes', tenant, bytes)
  enqueue(id, tenant, order)
end
local function forget(id)
  local job = redis.call('HMGET', JOB .. id, 'tenant', 'bytes', 'batch', 'status')
  if job[1] then
    count('jobs', job[1], -1)
    count('bytes', job[1], -job[2])
    shift(kind_of(job[3]), job[4], nil)
    redis.call('ZREM', QUEUED, id)
    redis.call('ZREM', JOBS_OF .. job[1], id)
  end
  redis.call('DEL', JOB .. id)
end
local function close(id)
  local job = redis.call('HMGET', JOB .. id, 'tenant', 'batch', 'record', 'outcome', 'result', 'keep', 'hook')
  local outcome, result = job[4], job[5] or ''
  redis.call('ZREM', RUNNING, id)
  if job[2] ~= '' then
    local line = '{{"spec":' .. job[3] .. ',"outcome":' .. outcome
    if result ~= '' then line = line .. ',"result":' .. result end
    line = line .. '}}'
    local status = cjson.decode(outcome).status
    redis.call('RPUSH', RESULTS .. job[2], line)
    redis.call('SREM', LINES .. job[2], id)
    redis.call('HINCRBY', BATCH .. job[2], status == 'succeeded' and 'completed' or 'failed', 1)
    redis.call('HINCRBY', BATCH .. job[2], 'waiting', 1)
    redis.call('HINCRBY', BATCH .. job[2], 'waiting_bytes', #line)
    forget(id)
    event('batch', job[2])
    return
  end
  become(id, cjson.decode(outcome).status)
  redis.call('HINCRBY', JOB .. id, 'bytes', #result)
  redis.call('HDEL', JOB .. id, 'bill')
  count('bytes', job[1], #result)
  redis.call('ZADD', ENDED, text(now + job[6]), id)
  if job[7] then
    redis.call('ZADD', HOOKS, text(now), id)
    event('hook', id)
  end
  event('ended', id)
end
local function holds(id, attempt)
  return redis.call('HGET', JOB .. id, 'attempt') == attempt and redis.call('ZSCORE', RUNNING, id)
end
local function due(...)
  local first = false
  for _, key in ipairs({{...}}) do
    local next = redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2]
    if next and (not first or tonumber(next) < first) then first = tonumber(next) end
  end
  return first and text(math.max(0, first - now)) or ''
end
"""

# ARGV id tenant record body hook max-jobs max-bytes
_SUBMIT = LuaScript(
    JOBS
    + """
if redis.call('EXISTS', JOB .. ARGV[1]) == 1 then return 'exists' end
local full = beyond('jobs', ARGV[2], 1, ARGV[6]) or beyond('bytes', ARGV[2], #ARGV[4], ARGV[7])
if full then return full end
add(ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], '', 0)
event('queued', ARGV[1])
return 'queued'
"""
)

# A tenant whose turn it is gives its first job, and goes to the end of the turns.
# ARGV limit ttl-ms step without*
_CLAIM = LuaScript(
    WRITE_WHEN_FULL
    + JOBS
    + """
local step = tonumber(ARGV[3])
for _, id in ipairs(redis.call('ZRANGEBYSCORE', ENDED, '-inf', text(now), 'LIMIT', 0, step)) do
  if redis.call('ZSCORE', HOOKS, id) then
    redis.call('ZADD', ENDED, text(now + 60000), id)
  else
    redis.call('ZREM', ENDED, id)
    forget(id)
  end
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', LATER, '-inf', text(now), 'LIMIT', 0, step)) do
  redis.call('ZREM', LATER, id)
  local job = redis.call('HMGET', JOB .. id, 'tenant', 'order')
  if job[1] then enqueue(id, job[1], job[2]) end
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', RUNNING, '-inf', text(now), 'LIMIT', 0, step)) do
  redis.call('ZREM', RUNNING, id)
  local job = redis.call('HMGET', JOB .. id, 'tenant', 'order', 'status')
  if job[1] then
    if job[3] == 'running' then
      redis.call('HINCRBY', JOB .. id, 'lost', 1)
      become(id, 'queued')
    end
    enqueue(id, job[1], job[2])
  end
end
local skipped, claimed, passed = {}, {}, 0
for i = 4, #ARGV do skipped[ARGV[i]] = true end
while #claimed < tonumber(ARGV[1]) do
  local tenant = redis.call('ZRANGE', TURNS, passed, passed)[1]
  if not tenant then break end
  local id = not skipped[tenant] and redis.call('ZRANGE', QUEUE .. tenant, 0, 0)[1]
  if skipped[tenant] then
    passed = passed + 1
  elseif not id then
    redis.call('ZREM', TURNS, tenant)
  else
    redis.call('ZREM', QUEUE .. tenant, id)
    redis.call('ZADD', TURNS, text(redis.call('HINCRBY', USAGE, 'serial', 1)), tenant)
    local job = redis.call('HMGET', JOB .. id, 'record', 'body', 'lost', 'cancelling', 'bill', 'status')
    if job[1] then
      local attempt = redis.call('HINCRBY', JOB .. id, 'attempt', 1)
      if job[6] == 'queued' then become(id, 'running') end
      redis.call('HSETNX', JOB .. id, 'started_at', string.format('%.3f', now / 1000))
      redis.call('ZADD', RUNNING, text(now + ARGV[2]), id)
      claimed[#claimed + 1] = {job[1], job[2], attempt, job[3] or '0', job[4] or '', job[5] or ''}
    end
  end
end
return {claimed, due(LATER, RUNNING, ENDED)}
"""
)

# Returns 0 for a lease that is lost, 2 for a job that is to be cancelled. ARGV ttl-ms (id attempt)*
_RENEW = LuaScript(
    WRITE_WHEN_FULL
    + JOBS
    + """
local found = {}
for i = 2, #ARGV, 2 do
  if not holds(ARGV[i], ARGV[i + 1]) then
    found[#found + 1] = 0
  else
    redis.call('ZADD', RUNNING, text(now + ARGV[1]), ARGV[i])
    found[#found + 1] = redis.call('HEXISTS', JOB .. ARGV[i], 'cancelling') == 1 and 2 or 1
  end
end
return found
"""
)

# ARGV id attempt delay-ms
_REQUEUE = LuaScript(
    WRITE_WHEN_FULL
    + JOBS
    + """
if not holds(ARGV[1], ARGV[2]) then return 0 end
redis.call('ZREM', RUNNING, ARGV[1])
local job = redis.call('HMGET', JOB .. ARGV[1], 'tenant', 'order', 'status')
if job[3] == 'running' then become(ARGV[1], 'queued') end
if tonumber(ARGV[3]) > 0 then
  redis.call('ZADD', LATER, text(now + ARGV[3]), ARGV[1])
else
  enqueue(ARGV[1], job[1], job[2])
end
event('queued', ARGV[1])
return 1
"""
)

# A repetition finds the job with its outcome. ARGV id attempt outcome result keep-ms bill
_FINISH = LuaScript(
    JOBS
    + """
local job = redis.call('HMGET', JOB .. ARGV[1], 'attempt', 'status', 'outcome')
if job[1] ~= ARGV[2] then return 0 end
if job[2] ~= 'running' then return job[3] == ARGV[3] and 1 or 0 end
if not redis.call('ZSCORE', RUNNING, ARGV[1]) then return 0 end
redis.call('HSET', JOB .. ARGV[1], 'outcome', ARGV[3], 'result', ARGV[4], 'keep', ARGV[5])
if ARGV[6] ~= '' then
  redis.call('HSET', JOB .. ARGV[1], 'bill', ARGV[6])
  become(ARGV[1], 'billing')
else
  close(ARGV[1])
end
return 1
"""
)

# ARGV id attempt keep-ms
_SETTLE = LuaScript(
    WRITE_WHEN_FULL
    + JOBS
    + """
local job = redis.call('HMGET', JOB .. ARGV[1], 'attempt', 'status')
if job[1] ~= ARGV[2] then return 0 end
if job[2] ~= 'billing' then return job[2] ~= 'running' and job[2] ~= 'queued' and 1 or 0 end
redis.call('HSET', JOB .. ARGV[1], 'keep', ARGV[3])
close(ARGV[1])
return 1
"""
)

# ARGV id outcome result keep-ms
_CANCEL = LuaScript(
    WRITE_WHEN_FULL
    + JOBS
    + """
local id = ARGV[1]
local job = redis.call('HMGET', JOB .. id, 'tenant', 'status')
if job[2] == 'queued' then
  redis.call('ZREM', QUEUE .. job[1], id)
  redis.call('ZREM', LATER, id)
  redis.call('HSET', JOB .. id, 'cancelling', 1, 'outcome', ARGV[2], 'result', ARGV[3], 'keep', ARGV[4])
  close(id)
elseif job[2] == 'running' and redis.call('HSETNX', JOB .. id, 'cancelling', 1) == 1 then
  event('cancelling', id)
end
return redis.call('HGETALL', JOB .. id)
"""
)

# A webhook is of a job, or of a batch: which of them has the id.
_HOOKS = f"""
local BATCHES = '{keys.BATCHES}'
local function home_of(id) return redis.call('EXISTS', JOB .. id) == 1 and JOB or BATCH end
"""

# ARGV limit ttl-ms step without*
_CLAIM_HOOKS = LuaScript(
    WRITE_WHEN_FULL
    + JOBS
    + _HOOKS
    + """
local claimed, skipped = {}, {}
for i = 4, #ARGV do skipped[ARGV[i]] = true end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', HOOKS, '-inf', text(now), 'LIMIT', 0, ARGV[3])) do
  local home = home_of(id)
  local tenant = redis.call('HGET', home .. id, 'tenant')
  if not tenant then
    redis.call('ZREM', HOOKS, id)
  elseif not skipped[tenant] and #claimed < tonumber(ARGV[1]) then
    redis.call('HINCRBY', home .. id, 'tries', 1)
    redis.call('ZADD', HOOKS, text(now + ARGV[2]), id)
    claimed[#claimed + 1] = {redis.call('HGETALL', home .. id), redis.call('HGET', BATCHES, id) or ''}
  end
end
return {claimed, due(HOOKS)}
"""
)

# ARGV id attempt status retry-ms
_END_HOOK = LuaScript(
    WRITE_WHEN_FULL
    + JOBS
    + _HOOKS
    + """
local home = home_of(ARGV[1])
if redis.call('HGET', home .. ARGV[1], 'tries') ~= ARGV[2] then return 0 end
if not redis.call('ZSCORE', HOOKS, ARGV[1]) then return 0 end
redis.call('HSET', home .. ARGV[1], 'hook', ARGV[3])
if ARGV[3] == 'waiting' then
  redis.call('ZADD', HOOKS, text(now + ARGV[4]), ARGV[1])
else
  redis.call('ZREM', HOOKS, ARGV[1])
end
event('hook', ARGV[1])
return 1
"""
)

# One more than the limit shows that there are more. ARGV tenant after limit
_LIST = LuaScript(
    JOBS
    + """
local first = 0
if ARGV[2] ~= '' then
  first = redis.call('ZREVRANK', JOBS_OF .. ARGV[1], ARGV[2])
  if not first then return false end
  first = first + 1
end
local found = {}
for _, id in ipairs(redis.call('ZREVRANGE', JOBS_OF .. ARGV[1], first, first + ARGV[3])) do
  local fields = {'body', ''}
  local names = {'record', 'status', 'attempt', 'started_at', 'outcome', 'cancelling', 'hook'}
  local values = redis.call('HMGET', JOB .. id, unpack(names))
  if values[2] == 'failed' then
    names[#names + 1] = 'result'
    values[#values + 1] = redis.call('HGET', JOB .. id, 'result')
  end
  for i, name in ipairs(names) do
    if values[i] then
      fields[#fields + 1] = name
      fields[#fields + 1] = values[i]
    end
  end
  found[#found + 1] = fields
end
return found
"""
)

_COUNTS = LuaScript(
    JOBS
    + """
local first = redis.call('ZRANGE', QUEUED, 0, 0, 'WITHSCORES')[2]
return {redis.call('HGETALL', STATES), first and text(math.max(0, now - first)) or ''}
"""
)

Fields = dict[bytes, bytes]


class RedisJobs(RedisStore):
    """Jobs, their queue and their webhooks."""

    async def submit_job(self, spec: JobSpec, body: bytes, bounds: JobBounds) -> Submission:
        outcome = await self._redis.script(
            _SUBMIT,
            [],
            [spec.id, spec.tenant, encode(spec), body, spec.webhook, bounds.jobs, bounds.job_bytes],
            replicated=True,
        )
        return Submission(outcome.decode())

    async def job(self, job_id: str) -> Job:
        return _job(job_id, await self._redis.call("HGETALL", keys.job(job_id)))

    async def predictions(
        self, tenant: str, *, limit: int, after: str | None = None
    ) -> tuple[list[Job], bool]:
        found = await self._redis.script(_LIST, [], [tenant, after or "", limit])
        if found is None:
            raise NotFound(f"no job {after}")
        return [_job("", fields) for fields in found[:limit]], len(found) > limit

    async def job_counts(self) -> JobCounts:
        states, oldest_ms = await self._redis.script(_COUNTS, [], [])
        by_kind: dict[str, dict[str, int]] = {}
        for name, count in _fields(states).items():
            kind, status = name.decode().split(" ")
            by_kind.setdefault(kind, {})[status] = int(count)
        return JobCounts(
            predictions={JobStatus(of): count for of, count in by_kind.get("prediction", {}).items()},
            lines={JobStatus(of): count for of, count in by_kind.get("line", {}).items()},
            batches={BatchStatus(of): count for of, count in by_kind.get("batch", {}).items()},
            oldest_queued_s=_seconds(oldest_ms),
        )

    async def claim_jobs(self, limit: int, *, ttl_s: float, without: Sequence[str] = ()) -> JobClaims:
        claimed, due_ms = await self._redis.script(_CLAIM, [], [limit, redis_ttl_ms(ttl_s), _STEP, *without])
        return JobClaims(jobs=tuple(map(_claimed, claimed)), due_in_s=_seconds(due_ms))

    async def renew_jobs(self, leases: Sequence[JobLease], *, ttl_s: float) -> LeaseRenewal:
        if not leases:
            return LeaseRenewal()
        named = [value for lease in leases for value in (lease.id, lease.attempt)]
        found = await self._redis.script(_RENEW, [], [redis_ttl_ms(ttl_s), *named])
        pairs = list(zip(leases, found, strict=True))
        return LeaseRenewal(
            lost=tuple([lease for lease, state in pairs if state == 0]),
            cancelling=tuple([lease for lease, state in pairs if state == 2]),
        )

    async def requeue_job(self, lease: JobLease, *, delay_s: float = 0.0) -> bool:
        return bool(
            await self._redis.script(_REQUEUE, [], [lease.id, lease.attempt, max(0, round(delay_s * 1000))])
        )

    async def finish_job(
        self,
        lease: JobLease,
        outcome: JobOutcome,
        result: bytes,
        *,
        keep_s: float,
        bill: RequestRecord | None = None,
    ) -> bool:
        return bool(
            await self._redis.script(
                _FINISH,
                [],
                [
                    *(lease.id, lease.attempt, encode(outcome), result, redis_ttl_ms(keep_s)),
                    b"" if bill is None else encode(bill),
                ],
                replicated=True,
            )
        )

    async def settle_job(self, lease: JobLease, *, keep_s: float) -> bool:
        return bool(await self._redis.script(_SETTLE, [], [lease.id, lease.attempt, redis_ttl_ms(keep_s)]))

    async def cancel_job(self, job_id: str, outcome: JobOutcome, result: bytes, *, keep_s: float) -> Job:
        found = await self._redis.script(_CANCEL, [], [job_id, encode(outcome), result, redis_ttl_ms(keep_s)])
        return _job(job_id, found)

    async def claim_hooks(self, limit: int, *, ttl_s: float, without: Sequence[str] = ()) -> HookClaims:
        claimed, due_ms = await self._redis.script(
            _CLAIM_HOOKS, [], [limit, redis_ttl_ms(ttl_s), _DUE_HOOKS, *without]
        )
        hooks = []
        for found, batch in claimed:
            fields = _fields(found)
            subject = ended_batch(batch, fields) if batch else _job("", found)
            hooks.append(ClaimedHook(subject=subject, attempt=int(fields[b"tries"])))
        return HookClaims(hooks=tuple(hooks), due_in_s=_seconds(due_ms))

    async def end_hook(
        self, subject_id: str, attempt: int, status: HookStatus, *, retry_in_s: float = 0.0
    ) -> bool:
        return bool(
            await self._redis.script(
                _END_HOOK, [], [subject_id, attempt, status.value, max(0, round(retry_in_s * 1000))]
            )
        )

    async def watch_jobs(self) -> AsyncIterator[Sequence[JobEvent]]:
        async with self._redis.dedicated() as connection:
            (last,) = await connection.run(("XREVRANGE", keys.JOB_EVENTS, "+", "-", "COUNT", 1))
            cursor = _answer(last)[0][0].decode() if _answer(last) else "0-0"
            yield ()
            while True:
                (read,) = await connection.run(
                    (
                        "XREAD",
                        "COUNT",
                        BATCH,
                        "BLOCK",
                        int(BLOCK_S * 1000),
                        "STREAMS",
                        keys.JOB_EVENTS,
                        cursor,
                    ),
                    blocking_s=BLOCK_S,
                )
                entries = _answer(read)[0][1] if _answer(read) else []
                if entries:
                    cursor = entries[-1][0].decode()
                    yield [
                        JobEvent(JobEventKind(kind.decode()), body.decode()) for _, (kind, body) in entries
                    ]


def _answer(reply: Any) -> Any:
    if isinstance(reply, ResponseError):
        raise StateUnavailable(f"Redis refused: {reply}") from reply
    return reply


def _seconds(due_ms: bytes) -> float | None:
    return int(due_ms) / 1000 if due_ms else None


def _fields(found: Sequence[bytes]) -> Fields:
    return dict(zip(found[::2], found[1::2], strict=True))


def _job(job_id: str, found: Sequence[bytes]) -> Job:
    if not found:
        raise NotFound(f"no job {job_id}")
    fields = _fields(found)
    started, outcome, hook = fields.get(b"started_at"), fields.get(b"outcome"), fields.get(b"hook")
    return Job(
        spec=decode(JobSpec, fields[b"record"], keys.JOB_PREFIX),
        body=fields[b"body"],
        status=JobStatus(fields[b"status"].decode()),
        attempt=int(fields[b"attempt"]),
        started_at=None if started is None else float(started),
        outcome=None if outcome is None else decode(JobOutcome, outcome, keys.JOB_PREFIX),
        result=fields.get(b"result", b""),
        cancelling=b"cancelling" in fields,
        hook=None if hook is None else HookStatus(hook.decode()),
    )


def ended_batch(raw: bytes, fields: Fields) -> EndedBatch:
    """Return a batch of its record and the hash beside it."""
    return EndedBatch(record=decode(BatchRecord, raw, keys.BATCHES), counts=batch_counts(fields))


def batch_counts(fields: Fields) -> BatchCounts:
    """Return the counts of the hash beside a batch's record."""
    hook = fields.get(b"hook")
    return BatchCounts(
        completed=int(fields.get(b"completed", 0)),
        failed=int(fields.get(b"failed", 0)),
        waiting=int(fields.get(b"waiting", 0)),
        waiting_bytes=int(fields.get(b"waiting_bytes", 0)),
        hook=None if hook is None else HookStatus(hook.decode()),
    )


def _claimed(found: Sequence[Any]) -> ClaimedJob:
    record, body, attempt, lost, cancelling, bill = found
    return ClaimedJob(
        spec=decode(JobSpec, record, keys.JOB_PREFIX),
        body=body,
        attempt=attempt,
        lost=int(lost),
        cancelling=bool(cancelling),
        bill=decode(RequestRecord, bill, keys.JOB_PREFIX) if bill else None,
    )
