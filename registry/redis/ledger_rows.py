"""Pages of the ledger's rows in Redis, by position."""

from dataclasses import dataclass
from typing import Any

from registry import keys
from registry.accounting.row_order import LedgerKind, Position, Row
from registry.codec import decode
from registry.records.usage import InstanceInterval, LostCall, RequestRecord
from registry.redis.connections import LuaScript
from registry.redis.store import RedisStore

# The archive's serial, whether there are more, and the records in order behind a position, up to another one.
# Lua compares strings by locale, sorted sets by bytes. A page ends where it reaches its limit of bytes.
# KEYS records index archive-state; ARGV after-at after-member upto-at upto-member count bytes
_PAGE = LuaScript("""
local function is_upto(a, b)
  for i = 1, math.min(#a, #b) do
    local x, y = string.byte(a, i), string.byte(b, i)
    if x ~= y then return x < y end
  end
  return #a <= #b
end
local function count_upto(at, member)
  local low = redis.call('ZCOUNT', KEYS[2], '-inf', '(' .. at)
  if member == '' then return low end
  local high = redis.call('ZCOUNT', KEYS[2], '-inf', at)
  while low < high do
    local middle = math.floor((low + high) / 2)
    if is_upto(redis.call('ZRANGE', KEYS[2], middle, middle)[1], member) then
      low = middle + 1
    else
      high = middle
    end
  end
  return low
end
local first = count_upto(ARGV[1], ARGV[2])
local stop = ARGV[3] ~= '' and count_upto(ARGV[3], ARGV[4]) or redis.call('ZCARD', KEYS[2])
local page, room = {}, tonumber(ARGV[6])
if first < stop then
  for _, id in ipairs(redis.call('ZRANGE', KEYS[2], first, math.min(stop, first + ARGV[5]) - 1)) do
    local record = redis.call('HGET', KEYS[1], id)
    page[#page + 1] = record
    room = room - (record and #record or 0)
    if room <= 0 then break end
  end
end
return {redis.call('HGET', KEYS[3], 'serial') or '0', first + #page < stop and 1 or 0, page}
""")

# Records of one page.
PAGE = 1000
# Limit of a page's bytes, so that decoding it takes a few milliseconds.
PAGE_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class RowKeys:
    """Where Redis has the rows of a kind: the records by id, and their sorted sets, the one by end first."""

    record: type[Any]
    records: str
    indexes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPage:
    """Rows in order, with the serial of the archive at that moment; `more` rows follow."""

    rows: list[Row]
    serial: int
    more: bool


ROW_KEYS: dict[LedgerKind, RowKeys] = {
    LedgerKind.REQUESTS: RowKeys(RequestRecord, keys.REQUESTS, (keys.REQUESTS_BY_END,)),
    LedgerKind.INTERVALS: RowKeys(
        InstanceInterval, keys.INTERVALS, (keys.INTERVALS_BY_END, keys.INTERVALS_BY_START)
    ),
    LedgerKind.LOST: RowKeys(LostCall, keys.LOST_CALLS, (keys.LOST_CALLS_BY_END,)),
}


class RedisLedgerRows(RedisStore):
    """The rows of the ledger."""

    async def row_page(
        self, kind: LedgerKind, after: Position, upto: Position | None = None, *, count: int = PAGE
    ) -> RowPage:
        """Return at most `count` rows behind `after`, up to and with `upto`."""
        where = ROW_KEYS[kind]
        bound = ("", "") if upto is None else (_score(upto), upto.member)
        serial, more, raws = await self._redis.script(
            _PAGE,
            [where.records, where.indexes[0], keys.ARCHIVE_STATE],
            [_score(after), after.member, *bound, count, PAGE_BYTES],
        )
        rows = [decode(where.record, raw, where.records) for raw in raws]
        return RowPage(rows=rows, serial=int(serial), more=bool(more))

    async def count_rows(self, kind: LedgerKind, before: float) -> int:
        """Return the number of rows here that ended before."""
        return int(await self._redis.call("ZCOUNT", ROW_KEYS[kind].indexes[0], "-inf", f"({float(before)!r}"))


def _score(position: Position) -> str:
    return repr(position.at)
