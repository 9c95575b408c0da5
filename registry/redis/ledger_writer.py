"""Request records on their way into the ledger: whatever comes while a write is under way goes together."""

import asyncio
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from registry import keys
from registry.api_key import SpendPeriod
from registry.codec import encode
from registry.quota import UNITS, spend_field
from registry.redis_connections import Connections, Script
from registry.usage import RequestRecord, voided
from registry.usage_report import COLUMNS, day_of, row_of

# Add each record whose id is new, then count it: a repetition changes nothing. A key's tokens are
# counted while it has a limit of them (registry/redis_quota.py keeps the field), its cost always. A sum
# that has no room left stays at its greatest: an error would leave a record that is in no sum.
# KEYS records by-end days; ARGV a msgpack array a record (see _packed). Returns a digit a record, 1 if it
# was new: a list would cost its reader much more.
_ADD_REQUESTS = Script(
    """
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
    if redis.call('HEXISTS', r[5], 'tokens') == 1 then
      add(r[5], 'tokens', r[6])
    end
    for _, field in ipairs(r[8]) do add(r[7], field, r[9]) end
    for j = 1, #r[11], 2 do add(r[10], r[11][j], r[11][j + 1]) end
  end
end
return redis.status_reply(table.concat(added))
"""
)
# Put ARGV[3] in the place of the record ARGV[2] and take its cost out of the sums.
# KEYS records spend day; ARGV id record instead minus-cost sums-field spend-field*
_VOID_REQUEST = Script(
    """
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
for i = 6, #ARGV do redis.call('HINCRBY', KEYS[2], ARGV[i], ARGV[4]) end
redis.call('HINCRBY', KEYS[3], ARGV[5], ARGV[4])
return 1
"""
)
_PERIODS = tuple(SpendPeriod)
_KEYS = (keys.REQUESTS, keys.REQUESTS_BY_END, keys.USAGE_DAYS)
_NEW = ord("1")
MOST_AT_ONCE = 64

_pack = msgspec.msgpack.Encoder().encode


@dataclass(slots=True)
class _Waiting:
    packed: bytes
    added: asyncio.Future[bool]


class LedgerWriter:
    """One write at a time. An error is that of every record of its write."""

    def __init__(self, connections: Connections) -> None:
        self._redis = connections
        self._waiting: list[_Waiting] = []
        self._writing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<LedgerWriter {len(self._waiting)} waiting>"

    def add(self, record: RequestRecord) -> asyncio.Future[bool]:
        """Whether the record was new; or StateUnavailable. If the caller cancels it, a write under way goes
        on, and one that waits is none."""
        one = _Waiting(_packed(record), asyncio.get_running_loop().create_future())
        self._waiting.append(one)
        if self._writing is None:
            self._writing = asyncio.create_task(self._write(), name="ledger writer")
        return one.added

    async def void(self, record: RequestRecord) -> bool:
        """Whether the ledger held just this record; now it holds a failed one. Raises StateUnavailable."""
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
        )
        return bool(done)

    async def _write(self) -> None:
        batch: list[_Waiting] = []
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:MOST_AT_ONCE], self._waiting[MOST_AT_ONCE:]
                # Whoever left told its client that there is no bill, and may write another record.
                batch = [one for one in batch if not one.added.done()]
                if not batch:
                    continue
                try:
                    added = await self._redis.script(_ADD_REQUESTS, _KEYS, [one.packed for one in batch])
                except Exception as error:  # handed on: each caller raises it, none waits for ever
                    for one in batch:
                        _settle(one.added, error)
                else:
                    for one, digit in zip(batch, added, strict=True):
                        _settle(one.added, digit == _NEW)
        finally:
            self._writing = None
            for one in (*batch, *self._waiting):  # only if this task was cancelled
                one.added.cancel()


def _settle(added: asyncio.Future[bool], outcome: bool | Exception) -> None:
    if added.done():  # its caller has left
        return
    if isinstance(outcome, Exception):
        added.set_exception(outcome)
    else:
        added.set_result(outcome)


def _packed(record: RequestRecord) -> bytes:
    # Amounts as text: a script's numbers are floats.
    day = day_of(record.ended_at)
    cost = str(record.cost_nanos)
    return _pack(
        (
            record.request_id,
            encode(record).decode(),
            repr(float(record.ended_at)),
            str(day),
            keys.bucket(record.key_id),
            str(UNITS * (record.prompt_tokens + record.completion_tokens)),
            keys.spend(record.key_id),
            [spend_field(period, record.ended_at) for period in _PERIODS] if record.cost_nanos else (),
            cost,
            keys.usage(day),
            _amounts(record),
        )
    )


def _amounts(record: RequestRecord) -> list[str]:
    """The sums that a record adds to, each with what it adds; nothing is as good as no sum."""
    row = row_of(record)
    amounts: list[str] = []
    for column, field in zip(COLUMNS, _sum_fields(record.function, record.tenant), strict=True):
        if amount := getattr(row, column):
            amounts += (field, str(amount))
    return amounts


@lru_cache(1024)
def _sum_fields(function: str, tenant: str) -> tuple[str, ...]:
    return tuple(encode((function, tenant, column)).decode() for column in COLUMNS)
