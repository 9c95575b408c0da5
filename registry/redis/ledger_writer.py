"""Batched writes of request records: all records that arrive during a write form the next batch."""

import asyncio
from functools import cached_property, lru_cache

import msgspec

from rdmacast.aio.shielded import Shieldable, abandon
from registry import keys
from registry.accounting.usage_report import COLUMNS, amounts_of, day_of
from registry.codec import encode
from registry.errors import StateUnavailable
from registry.records.api_key import SpendPeriod
from registry.records.quota import DAY_S, UNITS, spend_field
from registry.records.usage import RequestRecord, voided
from registry.redis.connections import ConnectionPool, LuaScript
from registry.redis.ledger_archive import client_member
from registry.redis.store import WRITE_WHEN_FULL

# Add and count each record with a new id; a repetition changes nothing. A key's tokens are counted while it
# has a token limit (registry/redis/quota.py creates the field), its cost always. A sum that overflows stays
# at its maximum: an error would leave a record that is in no sum. A record of a closed day may be in the
# archive: only the archive's writer of the present epoch adds it. What a batch adds to one sum is added up
# here first, as far as a script's numbers, which are floats, are exact.
# KEYS records by-end days by-client-id archive-state; ARGV a msgpack array a record (see _packed).
# Returns a digit a record, 1 if it was new, 2 if its day is closed: a list would cost its reader much more.
_ADD_REQUESTS = LuaScript("""
local EXACT = 2 ^ 53
local sums, has_tokens, days, ends, clients = {}, {}, {}, {}, {}
local function increase(key, field, amount)
  local sum = redis.pcall('HINCRBY', key, field, amount)
  if type(sum) == 'table' and sum.err then redis.call('HSET', key, field, '9223372036854775807') end
end
local function add(key, field, amount)
  local fields = sums[key] or {}
  local sum = (fields[field] or 0) + tonumber(amount)
  if sum >= EXACT then return increase(key, field, amount) end
  sums[key], fields[field] = fields, sum
end
local state, added = redis.call('HMGET', KEYS[5], 'closed', 'epoch'), {}
local closed = state[1] and tonumber(state[1])
for i = 1, #ARGV do
  local r = cmsgpack.unpack(ARGV[i])
  if closed and tonumber(r[3]) < closed and r[13] ~= state[2] then
    added[i] = 2
  elseif redis.call('HSETNX', KEYS[1], r[1], r[2]) == 0 then
    added[i] = 0
  else
    added[i] = 1
    ends[#ends + 1], ends[#ends + 2] = r[3], r[1]
    if not days[r[4]] then days[r[4]] = redis.call('SADD', KEYS[3], r[4]) end
    if r[12] ~= '' then clients[#clients + 1], clients[#clients + 2] = 0, r[12] end
    if not has_tokens[r[5]] then has_tokens[r[5]] = redis.call('HEXISTS', r[5], 'tokens') end
    if has_tokens[r[5]] == 1 then add(r[5], 'tokens', r[6]) end
    for _, field in ipairs(r[8]) do add(r[7], field, r[9]) end
    for j = 1, #r[11], 2 do add(r[10], r[11][j], r[11][j + 1]) end
  end
end
if #ends > 0 then redis.call('ZADD', KEYS[2], unpack(ends)) end
if #clients > 0 then redis.call('ZADD', KEYS[4], unpack(clients)) end
for key, fields in pairs(sums) do
  for field, sum in pairs(fields) do increase(key, field, string.format('%.0f', sum)) end
end
return redis.status_reply(table.concat(added))
""")
# Replace the record ARGV[2] by ARGV[3] and subtract its cost from the sums, unless its day is closed.
# KEYS records spend day archive-state;
# ARGV id record instead minus-cost sums-field ended-at epoch spend-field*
_VOID_REQUEST = LuaScript(
    WRITE_WHEN_FULL
    + """
local state = redis.call('HMGET', KEYS[4], 'closed', 'epoch')
if state[1] and tonumber(ARGV[6]) < tonumber(state[1]) and ARGV[7] ~= state[2] then return 2 end
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
for i = 8, #ARGV do redis.call('HINCRBY', KEYS[2], ARGV[i], ARGV[4]) end
redis.call('HINCRBY', KEYS[3], ARGV[5], ARGV[4])
return 1
"""
)
_KEYS = (
    keys.REQUESTS,
    keys.REQUESTS_BY_END,
    keys.USAGE_DAYS,
    keys.REQUESTS_BY_CLIENT_ID,
    keys.ARCHIVE_STATE,
)
_NEW, _CLOSED = ord("1"), ord("2")
MAX_BATCH_RECORDS = 64

_pack = msgspec.msgpack.Encoder().encode


class DayClosed(StateUnavailable):
    """The record's day is closed: it may be in the archive."""

    def __init__(self) -> None:
        super().__init__("the day of the record is being archived")


class _QueuedRecord(msgspec.Struct):
    packed: bytes
    added: Shieldable[bool]


class LedgerWriter:
    """A writer with one batch in progress at a time; an error applies to all records of its batch."""

    def __init__(self, connections: ConnectionPool) -> None:
        self._redis = connections
        self._queue: list[_QueuedRecord] = []
        self._writing: asyncio.Task[None] | None = None

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    def __repr__(self) -> str:
        return f"<LedgerWriter {len(self._queue)} waiting>"

    def add(self, record: RequestRecord, *, epoch: int | None = None) -> asyncio.Future[bool]:
        """Add a record; the future returns whether it was new, or raises StateUnavailable.

        A record of a closed day needs the archive's present `epoch`. Cancelling the future drops a queued
        record, but does not stop a write in progress.
        """
        added: Shieldable[bool] = Shieldable(loop=self._loop)
        self._queue.append(_QueuedRecord(_packed(record, epoch), added))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write(), name="ledger writer")
        return added

    async def void(self, record: RequestRecord, *, epoch: int | None = None) -> bool:
        """Replace exactly this record by a failed one; return whether it existed. Raises StateUnavailable.

        A record of a closed day needs the archive's present `epoch`.
        """
        day = day_of(record.ended_at)
        done = await self._redis.script(
            _VOID_REQUEST,
            [keys.REQUESTS, keys.spend(record.key_id), keys.usage(day), keys.ARCHIVE_STATE],
            [
                record.request_id,
                encode(record),
                encode(voided(record)),
                str(-record.cost_nanos),
                _sum_fields(record.function, record.tenant)[COLUMNS.index("cost_nanos")],
                repr(float(record.ended_at)),
                "" if epoch is None else epoch,
                *(spend_field(period, record.ended_at) for period in SpendPeriod),
            ],
            replicated=True,
        )
        if done == 2:
            raise DayClosed
        return bool(done)

    async def _write(self) -> None:
        batch: list[_QueuedRecord] = []
        try:
            while self._queue:
                batch, self._queue = self._queue[:MAX_BATCH_RECORDS], self._queue[MAX_BATCH_RECORDS:]
                # A cancelled caller reported no bill to its client, and may write another record.
                batch = [one for one in batch if not one.added.done()]
                if not batch:
                    continue
                try:
                    added = await self._redis.script(
                        _ADD_REQUESTS, _KEYS, [one.packed for one in batch], replicated=True
                    )
                except Exception as error:  # passed on: each caller raises it, none waits for ever
                    for one in batch:
                        _settle(one.added, error)
                else:
                    for one, digit in zip(batch, added, strict=True):
                        _settle(one.added, DayClosed() if digit == _CLOSED else digit == _NEW)
        finally:
            self._writing = None
            for one in (*batch, *self._queue):  # only if this task was cancelled
                abandon(one.added)


def void_sums(record: RequestRecord) -> list[tuple[str, str, int]]:
    """Return key, field and amount of all sums from which a voided record's cost is subtracted."""
    field = _sum_fields(record.function, record.tenant)[COLUMNS.index("cost_nanos")]
    spent = [
        (keys.spend(record.key_id), spend_field(period, record.ended_at), -record.cost_nanos)
        for period in SpendPeriod
    ]
    return [(keys.usage(day_of(record.ended_at)), field, -record.cost_nanos), *spent]


def _settle(added: asyncio.Future[bool], outcome: bool | Exception) -> None:
    if added.done():  # cancelled by its caller
        return
    if isinstance(outcome, Exception):
        added.set_exception(outcome)
    else:
        added.set_result(outcome)


def _packed(record: RequestRecord, epoch: int | None) -> bytes:
    # Amounts as text: a script's numbers are floats.
    day = day_of(record.ended_at)
    day_text, usage, spend_fields = _day_parts(day)
    bucket, spend = _key_parts(record.key_id)
    return _pack(
        (
            record.request_id,
            encode(record).decode(),
            repr(float(record.ended_at)),
            day_text,
            bucket,
            str(UNITS * (record.prompt_tokens + record.completion_tokens)),
            spend,
            spend_fields if record.cost_nanos else (),
            str(record.cost_nanos),
            usage,
            _amounts(record),
            client_member(record) if record.client_request_id else "",
            "" if epoch is None else str(epoch),
        )
    )


@lru_cache(16)
def _day_parts(day: int) -> tuple[str, str, tuple[str, ...]]:
    """Return a UTC day as text, the key of its sums, and its fields of a key's spending."""
    at = day * DAY_S
    return str(day), keys.usage(day), tuple([spend_field(period, at) for period in SpendPeriod])


@lru_cache(1024)
def _key_parts(key_id: str) -> tuple[str, str]:
    return keys.bucket(key_id), keys.spend(key_id)


def _amounts(record: RequestRecord) -> list[str]:
    """Return the fields of the sums that a record adds to, each with its amount; zeros are omitted."""
    amounts: list[str] = []
    for field, amount in zip(_sum_fields(record.function, record.tenant), amounts_of(record), strict=True):
        if amount:
            amounts += (field, str(amount))
    return amounts


@lru_cache(1024)
def _sum_fields(function: str, tenant: str) -> tuple[str, ...]:
    return tuple(encode((function, tenant, column)).decode() for column in COLUMNS)
