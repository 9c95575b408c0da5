"""The usage ledger in one process, as in `registry.redis.ledger`."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import AsyncIterator, Sequence

from registry.accounting.ledger_pages import PAGE
from registry.accounting.usage_chunks import record_chunks
from registry.accounting.usage_report import UsageTotals, amounts_of, bounded, matches, overlaps
from registry.errors import Conflict, InvalidRecord, NotFound
from registry.records.usage import InstanceInterval, LostCall, PriceRate, RequestRecord, voided
from registry.state import Ledger, UsageChunk, UsageFilter, UsageRow

PAGE_PARTS = 2000  # limit of the calls of a page's intervals, except the last


def _order(record: RequestRecord) -> tuple[float, str]:
    return record.ended_at, record.request_id


class MemoryLedger(Ledger):
    """The usage ledger in dictionaries."""

    def __init__(self) -> None:
        self._requests: dict[str, RequestRecord] = {}
        self._by_end: list[RequestRecord] = []
        self._intervals: dict[tuple[str, str, float], InstanceInterval] = {}
        self._lost: dict[str, LostCall] = {}
        self._rates: dict[str, PriceRate] = {}

    async def add_request(self, record: RequestRecord) -> bool:
        if record.request_id in self._requests:
            return False
        self._requests[record.request_id] = record
        insort(self._by_end, record, key=_order)
        return True

    async def void_request(self, record: RequestRecord) -> bool:
        if self._requests.get(record.request_id) != record:
            return False
        at = bisect_left(self._by_end, _order(record), key=_order)
        self._requests[record.request_id] = self._by_end[at] = voided(record)
        return True

    async def request(self, request_id: str) -> RequestRecord:
        if request_id not in self._requests:
            raise NotFound(f"no request {request_id}")
        return self._requests[request_id]

    async def requests_by_client_id(self, client_request_id: str, *, limit: int = 100) -> list[RequestRecord]:
        return [one for one in self._by_end if one.client_request_id == client_request_id][-limit:]

    async def requests(
        self, where: UsageFilter, *, limit: int = 1000, cursor: str = ""
    ) -> tuple[list[RequestRecord], str]:
        start = 0
        if cursor:
            if cursor not in self._requests:
                raise InvalidRecord(f"unknown cursor {cursor!r}")
            start = bisect_right(self._by_end, _order(self._requests[cursor]), key=_order)
        where = bounded(where)
        found = [record for record in self._by_end[start:] if matches(where, record)]
        page = found[:limit]
        return page, page[-1].request_id if len(found) > limit else ""

    def usage_chunks(self, where: UsageFilter) -> AsyncIterator[UsageChunk]:
        return record_chunks(self, where)

    async def requests_by_id(
        self, request_ids: Sequence[str], *, since: float | None = None, until: float | None = None
    ) -> list[RequestRecord]:
        return [self._requests[name] for name in request_ids if name in self._requests]

    async def report(self, where: UsageFilter) -> list[UsageRow]:
        where, totals = bounded(where), UsageTotals()
        for record in self._by_end:
            if matches(where, record):
                totals.add(record.function, record.tenant, amounts_of(record))
        return totals.rows()

    async def add_interval(self, interval: InstanceInterval) -> bool:
        identity = interval.instance_id, interval.state, interval.from_at
        if identity in self._intervals:
            return False
        self._intervals[identity] = interval
        return True

    async def intervals(
        self, *, since: float | None = None, until: float | None = None
    ) -> list[InstanceInterval]:
        found = [interval for interval in self._intervals.values() if overlaps(interval, since, until)]
        return sorted(found, key=lambda i: (i.from_at, i.instance_id, i.state))

    async def interval_pages(
        self, *, since: float | None = None, until: float | None = None
    ) -> AsyncIterator[list[InstanceInterval]]:
        if since is not None and until is not None and until <= since:
            return
        found = sorted(await self.intervals(since=since, until=until), key=lambda one: one.to_at)
        page: list[InstanceInterval] = []
        parts = 0
        for interval in found:
            page.append(interval)
            parts += len(interval.calls)
            if len(page) == PAGE or parts >= PAGE_PARTS:
                yield page
                page, parts = [], 0
        if page:
            yield page

    async def add_lost_call(self, lost: LostCall) -> bool:
        if lost.id in self._lost:
            return False
        self._lost[lost.id] = lost
        return True

    async def lost_calls(self, *, since: float | None = None, until: float | None = None) -> list[LostCall]:
        found = [
            lost
            for lost in self._lost.values()
            if (since is None or since <= lost.ended_at) and (until is None or lost.ended_at < until)
        ]
        return sorted(found, key=lambda lost: (lost.ended_at, lost.id))

    async def lost_call_pages(
        self, *, since: float | None = None, until: float | None = None
    ) -> AsyncIterator[list[LostCall]]:
        found = await self.lost_calls(since=since, until=until)
        for start in range(0, len(found), PAGE):
            yield found[start : start + PAGE]

    async def rates(self) -> list[PriceRate]:
        return sorted(self._rates.values(), key=lambda rate: rate.id)

    async def put_rate(self, rate: PriceRate) -> None:
        if self._rates.setdefault(rate.id, rate) != rate:
            raise Conflict(f"rate {rate.id} exists with another price: use a new id for the new price")
