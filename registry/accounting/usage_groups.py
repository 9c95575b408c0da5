"""Sums over request records by any of their properties, and summaries of a period. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import add

from registry.accounting.usage_chunks import FIELDS, Value, tally_records
from registry.accounting.usage_report import COLUMNS
from registry.errors import InvalidRecord
from registry.records.usage import PriceRate, RequestRecord, RequestStatus
from registry.state import Tally

DEFAULT_BY = ("function", "tenant")
PROPERTIES = ("function", "tenant", "key", "node", "version", "status", "start_kind", "hour", "day")
assert set(PROPERTIES) < FIELDS.keys()
# Rows of one report: a finer grouping needs a narrower span of time.
MAX_ROWS = 20_000


class GroupedSums:
    """Sums by some properties. Feed it each record once."""

    def __init__(self, by: Sequence[str]) -> None:
        self._by = tuple(by)
        self._sums: dict[tuple[Value, ...], list[int]] = {}

    def add(self, record: RequestRecord) -> None:
        """Add a record. Raises InvalidRecord where there would be too many rows."""
        self.add_tallies(tally_records((record,), self._by))

    def add_tallies(self, tallies: Iterable[Tally], *, key: str | None = None) -> None:
        """Add the amounts of groups; with `key`, of groups that end with a key id, those with this one.

        Raises InvalidRecord where there would be too many rows.
        """
        for group, amounts in tallies:
            if key is not None:
                if group[-1] != key:
                    continue
                group = group[:-1]
            sums = self._sums.get(group)
            if sums is None:
                if len(self._sums) == MAX_ROWS:
                    raise InvalidRecord(f"more than {MAX_ROWS} rows: narrow the time or group by less")
                sums = self._sums[group] = [0] * len(COLUMNS)
            sums[:] = map(add, sums, amounts)

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
    status: Counter[Value] = field(default_factory=Counter)
    queue_ms: Counter[Value] = field(default_factory=Counter)
    exec_ms: Counter[Value] = field(default_factory=Counter)
    sums: list[int] = field(default_factory=lambda: [0] * len(COLUMNS))


class PeriodSums:
    """The summary of a period: by function, tenant and the currency of the rates."""

    GROUP = ("function", "tenant", "rate_id")
    COUNTED = ("status", "queue_ms", "exec_ms")

    def __init__(self, rates: Iterable[PriceRate]) -> None:
        self._currencies = {rate.id: rate.currency for rate in rates}
        self._periods: dict[tuple[str, str, str], _Period] = {}

    def add(self, record: RequestRecord) -> None:
        """Add a record."""
        for name in self.COUNTED:
            self.add_tallies(name, tally_records((record,), (*self.GROUP, name)))

    def add_tallies(self, name: str, tallies: Iterable[Tally]) -> None:
        """Add what records add to sums by GROUP and one of COUNTED; all of these are needed."""
        for (function, tenant, rate_id, value), amounts in tallies:
            # A record without a rate cost nothing, so that it has no currency of its own.
            group = str(function), str(tenant), self._currencies.get(str(rate_id), "USD")
            period = self._periods.get(group)
            if period is None:
                period = self._periods[group] = _Period()
            counts: Counter[Value] = getattr(period, name)
            counts[value] += amounts[0]
            if name == "status":
                period.sums[:] = map(add, period.sums, amounts)

    def rows(self) -> list[SummaryRow]:
        """Return the rows so far, in order of function and tenant."""
        return [
            SummaryRow(
                function=function,
                tenant=tenant,
                **dict(zip(COLUMNS, period.sums, strict=True)),
                ok=period.status[RequestStatus.OK],
                failed=period.status[RequestStatus.FAILED],
                cancelled=period.status[RequestStatus.CANCELLED],
                queue_p50_ms=percentile(period.queue_ms, 50),
                queue_p95_ms=percentile(period.queue_ms, 95),
                exec_p50_ms=percentile(period.exec_ms, 50),
                exec_p95_ms=percentile(period.exec_ms, 95),
                currency=currency,
            )
            for (function, tenant, currency), period in sorted(self._periods.items())
        ]


def percentile(counts: Mapping[Value, int], share: int) -> int:
    """Return the smallest value that is not below `share` per cent of the values (0 if there are none)."""
    rank = -(-sum(counts.values()) * share // 100)
    for value in sorted(map(int, counts)):
        rank -= counts[value]
        if rank <= 0:
            return value
    return 0
