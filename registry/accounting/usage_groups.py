"""Sums over request records by any of their properties, and summaries of a period. Pure."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from operator import add

from registry.accounting.usage_report import COLUMNS, DAY_S, amounts_of, day_of
from registry.errors import InvalidRecord
from registry.records.usage import PriceRate, RequestRecord, RequestStatus

HOUR_S = 3600
DEFAULT_BY = ("function", "tenant")
# Rows of one report: a finer grouping needs a narrower span of time.
MAX_ROWS = 20_000

Value = str | int


def _utc(at: float, form: str) -> str:
    return datetime.fromtimestamp(at, UTC).strftime(form)


# A day or an hour is that of `ended_at`, in UTC.
_PROPERTIES: Mapping[str, Callable[[RequestRecord], Value]] = {
    "function": lambda record: record.function,
    "tenant": lambda record: record.tenant,
    "key": lambda record: record.key_id,
    "node": lambda record: record.node,
    "version": lambda record: record.version,
    "status": lambda record: record.status.value,
    "start_kind": lambda record: record.start_kind,
    "hour": lambda record: _utc(record.ended_at // HOUR_S * HOUR_S, "%Y-%m-%dT%H:00Z"),
    "day": lambda record: _utc(day_of(record.ended_at) * DAY_S, "%Y-%m-%d"),
}
PROPERTIES = tuple(_PROPERTIES)


class GroupedSums:
    """Sums by some properties. Feed it each record once."""

    def __init__(self, by: Sequence[str]) -> None:
        self._by = tuple(by)
        self._sums: dict[tuple[Value, ...], list[int]] = {}

    def add(self, record: RequestRecord) -> None:
        """Add a record. Raises InvalidRecord where there would be too many rows."""
        group = tuple(_PROPERTIES[name](record) for name in self._by)
        sums = self._sums.get(group)
        if sums is None:
            if len(self._sums) == MAX_ROWS:
                raise InvalidRecord(f"more than {MAX_ROWS} rows: narrow the time or group by less")
            sums = self._sums[group] = [0] * len(COLUMNS)
        sums[:] = map(add, sums, amounts_of(record))

    def rows(self) -> list[dict[str, Value]]:
        """Return the rows so far, in order of their groups: the properties, then COLUMNS."""
        names, found = (*self._by, *COLUMNS), sorted(self._sums.items(), key=lambda item: item[0])
        return [dict(zip(names, (*group, *sums), strict=True)) for group, sums in found]


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryRow:
    """A period of one function, tenant and currency. Percentiles are nearest-rank, over all records."""

    function: str
    tenant: str
    requests: int
    ok: int
    failed: int
    cancelled: int
    prompt_tokens: int
    completion_tokens: int
    billed_gpu_ms: int
    queue_p50_ms: int
    queue_p95_ms: int
    exec_p50_ms: int
    exec_p95_ms: int
    cost_nanos: int
    currency: str


@dataclass(slots=True)
class _Period:
    statuses: Counter[RequestStatus] = field(default_factory=Counter)
    queue_ms: Counter[int] = field(default_factory=Counter)
    exec_ms: Counter[int] = field(default_factory=Counter)
    sums: list[int] = field(default_factory=lambda: [0] * len(COLUMNS))

    def add(self, record: RequestRecord) -> None:
        self.statuses[record.status] += 1
        self.queue_ms[record.queue_ms] += 1
        self.exec_ms[record.exec_ms] += 1
        self.sums[:] = map(add, self.sums, amounts_of(record))


class PeriodSums:
    """The summary of a period: by function, tenant and the currency of the rates."""

    def __init__(self, rates: Iterable[PriceRate]) -> None:
        self._currencies = {rate.id: rate.currency for rate in rates}
        self._periods: dict[tuple[str, str, str], _Period] = {}

    def add(self, record: RequestRecord) -> None:
        """Add a record."""
        # A record without a rate cost nothing, so that it has no currency of its own.
        currency = self._currencies.get(record.rate_id, "USD")
        group = record.function, record.tenant, currency
        period = self._periods.get(group)
        if period is None:
            period = self._periods[group] = _Period()
        period.add(record)

    def rows(self) -> list[SummaryRow]:
        """Return the rows so far, in order of function and tenant."""
        return [
            SummaryRow(
                function=function,
                tenant=tenant,
                **dict(zip(COLUMNS, period.sums, strict=True)),
                ok=period.statuses[RequestStatus.OK],
                failed=period.statuses[RequestStatus.FAILED],
                cancelled=period.statuses[RequestStatus.CANCELLED],
                queue_p50_ms=percentile(period.queue_ms, 50),
                queue_p95_ms=percentile(period.queue_ms, 95),
                exec_p50_ms=percentile(period.exec_ms, 50),
                exec_p95_ms=percentile(period.exec_ms, 95),
                currency=currency,
            )
            for (function, tenant, currency), period in sorted(self._periods.items())
        ]


def percentile(counts: Mapping[int, int], share: int) -> int:
    """Return the smallest value that is not below `share` per cent of the values (0 if there are none)."""
    rank = -(-sum(counts.values()) * share // 100)
    for value in sorted(counts):
        rank -= counts[value]
        if rank <= 0:
            return value
    return 0
