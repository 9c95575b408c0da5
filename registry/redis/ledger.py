"""The usage ledger in Redis: each record and its sums are added atomically, once."""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence

from registry import keys
from registry.accounting.ledger_pages import PAGE as INTERVALS_PAGE
from registry.accounting.ledger_pages import page_of_requests
from registry.accounting.row_order import (
    LedgerKind,
    Position,
    Row,
    interval_identity,
    position_at,
    position_of,
)
from registry.accounting.usage_chunks import add_chunks, record_chunks
from registry.accounting.usage_report import (
    COLUMNS,
    LONGEST_INTERVAL_S,
    DaySplit,
    UsageTotals,
    bounded,
    in_window,
    split_days,
)
from registry.codec import decode, encode
from registry.errors import Conflict, NotFound
from registry.records.usage import InstanceInterval, LostCall, PriceRate, RequestRecord
from registry.redis.connections import ConnectionPool, LuaScript
from registry.redis.ledger_archive import RedisLedgerArchive
from registry.redis.ledger_rows import PAGE
from registry.redis.ledger_writer import LedgerWriter
from registry.state import UsageChunk, UsageFilter, UsageRow

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


class RedisLedger(RedisLedgerArchive):
    """Request records, intervals, lost calls and rates."""

    def __init__(self, connections: ConnectionPool, *, feed_length: int = keys.FEED_LENGTH) -> None:
        super().__init__(connections, feed_length=feed_length)
        self._writer = LedgerWriter(connections)

    def add_request(self, record: RequestRecord, *, epoch: int | None = None) -> asyncio.Future[bool]:
        return self._writer.add(record, epoch=epoch)

    async def void_request(self, record: RequestRecord, *, epoch: int | None = None) -> bool:
        return await self._writer.void(record, epoch=epoch)

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
        return await page_of_requests(self._page_after, where, limit, cursor)

    def usage_chunks(self, where: UsageFilter) -> AsyncIterator[UsageChunk]:
        return record_chunks(self, where)

    async def requests_by_id(
        self, request_ids: Sequence[str], *, since: float | None = None, until: float | None = None
    ) -> list[RequestRecord]:
        if not request_ids:
            return []
        raws = await self._redis.call("HMGET", keys.REQUESTS, *request_ids)
        return [decode(RequestRecord, raw, keys.REQUESTS) for raw in raws if raw is not None]

    async def report(self, where: UsageFilter) -> list[UsageRow]:
        where = bounded(where)
        split = split_days(where.since, where.until)
        totals = await self.day_sums(where, split)
        for since, until in split.edges:
            edge = UsageFilter(since=since, until=until, function=where.function, tenant=where.tenant)
            await add_chunks(totals, self.usage_chunks(edge))
        return totals.rows()

    async def add_interval(self, interval: InstanceInterval) -> bool:
        added = await self._redis.script(
            _ADD_INTERVAL,
            [keys.INTERVALS, keys.INTERVALS_BY_END, keys.INTERVALS_BY_START],
            [
                interval_identity(interval),
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
        return await in_window(self.interval_pages(since=since, until=until), since, until)

    async def interval_pages(
        self, *, since: float | None = None, until: float | None = None
    ) -> AsyncIterator[list[InstanceInterval]]:
        if since is not None and until is not None and until <= since:
            return
        after, seen = position_at("", since), 0
        while rows := await self._page_after(LedgerKind.INTERVALS, after, INTERVALS_PAGE):
            page = [row for row in rows if isinstance(row, InstanceInterval)]
            yield page
            after = position_of(page[-1])
            if until is not None:
                seen += sum(one.from_at < until for one in page)
                # Counted again for each page: concurrent writes behind the cursor only cause more reads.
                if after.at >= until + LONGEST_INTERVAL_S or await self.count_intervals(since, until) <= seen:
                    return

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
        after = position_at("", since)
        while rows := await self._page_after(LedgerKind.LOST, after, PAGE):
            page = [row for row in rows if isinstance(row, LostCall)]
            yield [lost for lost in page if until is None or lost.ended_at < until]
            after = position_of(page[-1])
            if until is not None and after.at >= until:
                return

    async def rates(self) -> list[PriceRate]:
        raws = await self._redis.call("HVALS", keys.RATES)
        return sorted((decode(PriceRate, raw, keys.RATES) for raw in raws), key=lambda rate: rate.id)

    async def put_rate(self, rate: PriceRate) -> None:
        _, raw = await self._redis.run(
            ("HSETNX", keys.RATES, rate.id, encode(rate)), ("HGET", keys.RATES, rate.id)
        )
        if decode(PriceRate, raw, f"{keys.RATES}[{rate.id}]") != rate:
            raise Conflict(f"rate {rate.id} exists with another price: use a new id for the new price")

    async def count_intervals(self, since: float | None, until: float) -> int:
        """Return the number of intervals here that overlap `[since, until)`."""
        lowest = -math.inf if since is None else since
        count = await self._redis.script(
            _COUNT_OVERLAPPING,
            [keys.INTERVALS_BY_END, keys.INTERVALS_BY_START],
            [repr(float(lowest)), repr(float(until))],
        )
        return int(count)

    async def day_sums(self, where: UsageFilter, split: DaySplit) -> UsageTotals:
        """Return the sums of the whole days of a filter."""
        totals = UsageTotals()
        for day in await self._redis.call("SMEMBERS", keys.USAGE_DAYS):
            if split.covers(int(day)):
                for (function, tenant), sums in (await self._day(int(day))).items():
                    if where.function in (None, function) and where.tenant in (None, tenant):
                        totals.add(function, tenant, [sums.get(column, 0) for column in COLUMNS])
        return totals

    async def _page_after(self, kind: LedgerKind, after: Position, count: int) -> list[Row]:
        return (await self.row_page(kind, after, count=count)).rows

    async def _day(self, day: int) -> dict[tuple[str, str], dict[str, int]]:
        flat = await self._redis.call("HGETALL", keys.usage(day))
        sums: dict[tuple[str, str], dict[str, int]] = {}
        for field, amount in zip(flat[::2], flat[1::2], strict=True):
            function, tenant, column = decode(tuple[str, str, str], field, keys.usage(day))
            sums.setdefault((function, tenant), {})[column] = int(amount)
        return sums
