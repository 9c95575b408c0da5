"""Batched writes of request records: all records that arrive during a write form the next batch."""

import asyncio
from functools import lru_cache

import msgspec

from rdmacast.aio.shielded import Shieldable, abandon
from registry import keys
from registry.accounting.usage_report import COLUMNS, amounts_of, day_of
from registry.codec import encode
from registry.records.api_key import SpendPeriod
from registry.records.quota import DAY_S, UNITS, spend_field
from registry.records.usage import RequestRecord, voided
from registry.redis.connections import ConnectionPool, LuaScript
from registry.redis.store import WRITE_WHEN_FULL

# Add and count each record with a new id; a repetition changes nothing. A key's tokens are counted while it
# has a token limit (registry/redis/quota.py creates the field), its cost always. A sum that overflows stays
# at its maximum: an error would leave a record that is in no sum.
# KEYS records by-end days by-client-id; ARGV a msgpack array a record (see _packed).
# Returns a digit a record, 1 if it was new: a list would cost its reader much more.
_ADD_REQUESTS = LuaScript("""
local function add(key, field, amount)
  local sum = redis.pcall('HINCRBY', key, field, amount)
  if type(sum) == 'table' and sum.err then redis.call('HSET', key, field, '9223372036854775807') end
end
local added = {}
for i = 1, #ARGV do
  local r = cmsgpack.unpack(ARGV[i])
  if redis.call('HSETNX', KEYS[1], r[1], r[2]) == 0 then
    added[i] = 0
  else
    added[i] = 1
    redis.call('ZADD', KEYS[2], r[3], r[1])
    redis.call('SADD', KEYS[3], r[4])
    if r[12] ~= '' then redis.call('ZADD', KEYS[4], 0, r[12]) end
    if redis.call('HEXISTS', r[5], 'tokens') == 1 then
      add(r[5], 'tokens', r[6])
    end
    for _, field in ipairs(r[8]) do add(r[7], field, r[9]) end
    for j = 1, #r[11], 2 do add(r[10], r[11][j], r[11][j + 1]) end
  end
end
return redis.status_reply(table.concat(added))
""")
# Replace the record ARGV[2] by ARGV[3] and subtract its cost from the sums.
# KEYS records spend day; ARGV id record instead minus-cost sums-field spend-field*
_VOID_REQUEST = LuaScript(
    WRITE_WHEN_FULL
    + """
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
for i = 6, #ARGV do redis.call('HINCRBY', KEYS[2], ARGV[i], ARGV[4]) end
redis.call('HINCRBY', KEYS[3], ARGV[5], ARGV[4])
return 1
"""
)
_KEYS = (keys.REQUESTS, keys.REQUESTS_BY_END, keys.USAGE_DAYS, keys.REQUESTS_BY_CLIENT_ID)
_NEW = ord("1")
MAX_BATCH_RECORDS = 64

_pack = msgspec.msgpack.Encoder().encode


class _QueuedRecord(msgspec.Struct):
    packed: bytes
    added: Shieldable[bool]


class LedgerWriter:
    """A writer with one batch in progress at a time; an error applies to all records of its batch."""

    def __init__(self, connections: ConnectionPool) -> None:
        self._redis = connections
        self._queue: list[_QueuedRecord] = []
        self._writing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<LedgerWriter {len(self._queue)} waiting>"

    def add(self, record: RequestRecord) -> asyncio.Future[bool]:
        """Add a record; the future returns whether it was new, or raises StateUnavailable.

        Cancelling the future drops a queued record, but does not stop a write in progress.
        """
        added: Shieldable[bool] = Shieldable()
        self._queue.append(_QueuedRecord(_packed(record), added))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write(), name="ledger writer")
        return added

    async def void(self, record: RequestRecord) -> bool:
        """Replace exactly this record by a failed one; return whether it existed. Raises StateUnavailable."""
        day = day_of(record.ended_at)
        done = await self._redis.script(
            _VOID_REQUEST,
            [keys.REQUESTS, keys.spend(record.key_id), keys.usage(day)],
            [
                record.request_id,
                encode(record),
                encode(voided(record)),
                str(-record.cost_nanos),
                _sum_fields(record.function, record.tenant)[COLUMNS.index("cost_nanos")],
                *(spend_field(period, record.ended_at) for period in SpendPeriod),
            ],
            replicated=True,
        )
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
                        _settle(one.added, digit == _NEW)
        finally:
            self._writing = None
            for one in (*batch, *self._queue):  # only if this task was cancelled
                abandon(one.added)


def _settle(added: asyncio.Future[bool], outcome: bool | Exception) -> None:
    if added.done():  # cancelled by its caller
        return
    if isinstance(outcome, Exception):
        added.set_exception(outcome)
    else:
        added.set_result(outcome)


def _packed(record: RequestRecord) -> bytes:
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
            _client_index(record) if record.client_request_id else "",
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


def _client_index(record: RequestRecord) -> str:
    """Return the record's member of the index by client request id."""
    return keys.client_request(record.client_request_id, record.ended_at, record.request_id)


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
