"""The usage ledger in Redis: each record and its sums are added atomically, once."""

import math
from collections.abc import AsyncIterator, Sequence

from registry import keys
from registry.accounting.ledger_pages import PAGE as INTERVALS_PAGE
from registry.accounting.ledger_pages import each_request
from registry.accounting.usage_report import (
    COLUMNS,
    LONGEST_INTERVAL_S,
    UsageTotals,
    amounts_of,
    bounded,
    matches,
    overlaps,
    split_days,
)
from registry.codec import decode, encode
from registry.errors import Conflict, InvalidRecord, NotFound
from registry.records.usage import InstanceInterval, LostCall, PriceRate, RequestRecord
from registry.redis.connections import ConnectionPool, LuaScript
from registry.redis.ledger_writer import LedgerWriter
from registry.redis.store import RedisStore
from registry.state import UsageFilter, UsageRow

# KEYS records by-end; ARGV id record ended-at
_ADD_UNSUMMED = LuaScript("""
if redis.call('HSETNX', KEYS[1], ARGV[1], ARGV[2]) == 0 then return 0 end
redis.call('ZADD', KEYS[2], ARGV[3], ARGV[1])
return 1
""")

# KEYS intervals by-end by-start; ARGV id interval to-at from-at
_ADD_INTERVAL = LuaScript("""
if redis.call('HSETNX', KEYS[1], ARGV[1], ARGV[2]) == 0 then return 0 end
redis.call('ZADD', KEYS[2], ARGV[3], ARGV[1])
redis.call('ZADD', KEYS[3], ARGV[4], ARGV[1])
return 1
""")

# Number of intervals that start before `until` and do not end before `since`.
# KEYS by-end by-start; ARGV since until
_COUNT_OVERLAPPING = LuaScript("""
local started = redis.call('ZCOUNT', KEYS[2], '-inf', '(' .. ARGV[2])
return started - redis.call('ZCOUNT', KEYS[1], '-inf', '(' .. ARGV[1])
""")

# The next records in order: after the member ARGV[1], or from the score ARGV[2] on if that is "".
# The rank makes a page start right after its cursor, also among equal scores. -1: no such cursor.
# A page ends with the record that reaches its limit of bytes.
# KEYS records index; ARGV cursor min-score count bytes
_PAGE = LuaScript("""
local start
if ARGV[1] ~= '' then
  start = redis.call('ZRANK', KEYS[2], ARGV[1])
  if not start then return -1 end
  start = start + 1
else
  start = redis.call('ZCOUNT', KEYS[2], '-inf', '(' .. ARGV[2])
end
local ids = redis.call('ZRANGE', KEYS[2], start, start + ARGV[3] - 1)
local page, room = {}, tonumber(ARGV[4])
for at = 1, #ids do
  local record = redis.call('HGET', KEYS[1], ids[at])
  page[at] = record
  room = room - (record and #record or 0)
  if room <= 0 then break end
end
return page
""")

# Records of one page.
PAGE = 1000
# Limit of a page's bytes, so that decoding it takes a few milliseconds.
PAGE_BYTES = 256 << 10


class RedisLedger(RedisStore):
    """Request records, intervals, lost calls and rates."""

    def __init__(self, connections: ConnectionPool, *, feed_length: int = keys.FEED_LENGTH) -> None:
        super().__init__(connections, feed_length=feed_length)
        self._writer = LedgerWriter(connections)
        self.add_request = self._writer.add

    async def void_request(self, record: RequestRecord) -> bool:
        return await self._writer.void(record)

    async def request(self, request_id: str) -> RequestRecord:
        raw = await self._redis.call("HGET", keys.REQUESTS, request_id)
        if raw is None:
            raise NotFound(f"no request {request_id}")
        return decode(RequestRecord, raw, f"{keys.REQUESTS}[{request_id}]")

    async def requests_by_client_id(self, client_request_id: str, *, limit: int = 100) -> list[RequestRecord]:
        # A client's id has no space, so that its members are those between these two characters.
        first, last = f"[{client_request_id} ", f"({client_request_id}!"
        members = await self._redis.call(
            "ZREVRANGEBYLEX", keys.REQUESTS_BY_CLIENT_ID, last, first, "LIMIT", 0, limit
        )
        found = await self.requests_by_id([member.decode().rpartition(" ")[2] for member in members])
        return sorted(found, key=lambda record: (record.ended_at, record.request_id))

    async def requests(
        self, where: UsageFilter, *, limit: int = 1000, cursor: str = ""
    ) -> tuple[list[RequestRecord], str]:
        found: list[RequestRecord] = []
        async for record in self._rows(bounded(where), cursor, page=min(PAGE, limit + 1)):
            if len(found) == limit:
                return found, found[-1].request_id
            found.append(record)
        return found, ""

    async def requests_by_id(self, request_ids: Sequence[str]) -> list[RequestRecord]:
        if not request_ids:
            return []
        raws = await self._redis.call("HMGET", keys.REQUESTS, *request_ids)
        return [decode(RequestRecord, raw, keys.REQUESTS) for raw in raws if raw is not None]

    async def report(self, where: UsageFilter) -> list[UsageRow]:
        where = bounded(where)
        split = split_days(where.since, where.until)
        totals = UsageTotals()
        for day in await self._redis.call("SMEMBERS", keys.USAGE_DAYS):
            if split.covers(int(day)):
                for (function, tenant), sums in (await self._day(int(day))).items():
                    if where.function in (None, function) and where.tenant in (None, tenant):
                        totals.add(function, tenant, [sums.get(column, 0) for column in COLUMNS])
        for since, until in split.edges:
            edge = UsageFilter(since=since, until=until, function=where.function, tenant=where.tenant)
            async for record in each_request(self, edge):
                totals.add(record.function, record.tenant, amounts_of(record))
        return totals.rows()

    async def add_interval(self, interval: InstanceInterval) -> bool:
        added = await self._redis.script(
            _ADD_INTERVAL,
            [keys.INTERVALS, keys.INTERVALS_BY_END, keys.INTERVALS_BY_START],
            [
                _identity(interval),
                encode(interval),
                repr(float(interval.to_at)),
                repr(float(interval.from_at)),
            ],
            replicated=True,
        )
        return bool(added)

    async def intervals(
        self, *, since: float | None = None, until: float | None = None
    ) -> list[InstanceInterval]:
        found = [
            one
            async for page in self.interval_pages(since=since, until=until)
            for one in page
            if overlaps(one, since, until)
        ]
        return sorted(found, key=lambda i: (i.from_at, i.instance_id, i.state))

    async def interval_pages(
        self, *, since: float | None = None, until: float | None = None
    ) -> AsyncIterator[list[InstanceInterval]]:
        if since is not None and until is not None and until <= since:
            return
        cursor: str | bytes = ""
        seen = 0
        while raws := await self._page(keys.INTERVALS, keys.INTERVALS_BY_END, cursor, since, INTERVALS_PAGE):
            page = [decode(InstanceInterval, raw, keys.INTERVALS) for raw in raws]
            yield page
            if until is not None:
                seen += sum(one.from_at < until for one in page)
                # Counted again for each page: concurrent writes behind the cursor only cause more reads.
                if page[-1].to_at >= until + LONGEST_INTERVAL_S or await self._seen_all(seen, since, until):
                    return
            cursor = _identity(page[-1])

    async def add_lost_call(self, lost: LostCall) -> bool:
        added = await self._redis.script(
            _ADD_UNSUMMED,
            [keys.LOST_CALLS, keys.LOST_CALLS_BY_END],
            [lost.id, encode(lost), repr(float(lost.ended_at))],
            replicated=True,
        )
        return bool(added)

    async def lost_calls(self, *, since: float | None = None, until: float | None = None) -> list[LostCall]:
        return [one async for page in self.lost_call_pages(since=since, until=until) for one in page]

    async def lost_call_pages(
        self, *, since: float | None = None, until: float | None = None
    ) -> AsyncIterator[list[LostCall]]:
        cursor = ""
        while raws := await self._page(keys.LOST_CALLS, keys.LOST_CALLS_BY_END, cursor, since, PAGE):
            page = [decode(LostCall, raw, keys.LOST_CALLS) for raw in raws]
            yield [lost for lost in page if until is None or lost.ended_at < until]
            if until is not None and page[-1].ended_at >= until:
                return
            cursor = page[-1].id

    async def rates(self) -> list[PriceRate]:
        raws = await self._redis.call("HVALS", keys.RATES)
        return sorted((decode(PriceRate, raw, keys.RATES) for raw in raws), key=lambda rate: rate.id)

    async def put_rate(self, rate: PriceRate) -> None:
        _, raw = await self._redis.run(
            ("HSETNX", keys.RATES, rate.id, encode(rate)), ("HGET", keys.RATES, rate.id)
        )
        if decode(PriceRate, raw, f"{keys.RATES}[{rate.id}]") != rate:
            raise Conflict(f"rate {rate.id} exists with another price: use a new id for the new price")

    async def _rows(
        self, where: UsageFilter, cursor: str = "", *, page: int = PAGE
    ) -> AsyncIterator[RequestRecord]:
        """Yield the matching records in order of `ended_at`, after the one with the id `cursor`."""
        while raws := await self._page(keys.REQUESTS, keys.REQUESTS_BY_END, cursor, where.since, page):
            for raw in raws:
                record = decode(RequestRecord, raw, keys.REQUESTS)
                if where.until is not None and record.ended_at >= where.until:
                    return
                if matches(where, record):
                    yield record
            cursor = record.request_id

    async def _page(
        self, records: str, index: str, cursor: str | bytes, since: float | None, count: int
    ) -> list[bytes]:
        lowest = "-inf" if since is None else repr(float(since))
        page = await self._redis.script(_PAGE, [records, index], [cursor, lowest, count, PAGE_BYTES])
        if page == -1:
            raise InvalidRecord(f"unknown cursor {cursor!r}")
        return list(page)

    async def _seen_all(self, seen: int, since: float | None, until: float) -> bool:
        """Return whether `seen` is the number of all intervals that overlap `[since, until)`."""
        lowest = -math.inf if since is None else since
        count = await self._redis.script(
            _COUNT_OVERLAPPING,
            [keys.INTERVALS_BY_END, keys.INTERVALS_BY_START],
            [repr(float(lowest)), repr(float(until))],
        )
        return int(count) <= seen

    async def _day(self, day: int) -> dict[tuple[str, str], dict[str, int]]:
        flat = await self._redis.call("HGETALL", keys.usage(day))
        sums: dict[tuple[str, str], dict[str, int]] = {}
        for field, amount in zip(flat[::2], flat[1::2], strict=True):
            function, tenant, column = decode(tuple[str, str, str], field, keys.usage(day))
            sums.setdefault((function, tenant), {})[column] = int(amount)
        return sums


def _identity(interval: InstanceInterval) -> bytes:
    # A whole number of seconds may be an int, which is encoded differently.
    return encode((interval.instance_id, interval.state, float(interval.from_at)))
