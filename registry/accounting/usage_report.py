"""Sums over request records: the whole days of a filter, and totals of rows. Pure."""

import math
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import add

from registry.errors import InvalidRecord
from registry.records.quota import DAY_S
from registry.records.usage import InstanceInterval, RequestRecord
from registry.state import Tally, UsageFilter, UsageRow

# A node ends an interval at least every day (--meter-interval), once it is between steps.
LONGEST_INTERVAL_S = 2.0 * DAY_S
COLUMNS = ("requests", "prompt_tokens", "completion_tokens", "billed_gpu_ms", "cost_nanos")


@dataclass(frozen=True, slots=True)
class DaySplit:
    """A span of time as whole UTC days `[first, end)` (None: unbounded) and the spans at its edges."""

    first: int | None
    end: int | None
    edges: tuple[tuple[float | None, float | None], ...]

    def covers(self, day: int) -> bool:
        return (self.first is None or self.first <= day) and (self.end is None or day < self.end)


def day_of(at: float) -> int:
    """Return the UTC day of the moment (floor division of floats is exact, division is not)."""
    return int(at // DAY_S)


def bounded(where: UsageFilter) -> UsageFilter:
    """Return the filter with infinite bounds as None."""
    since = None if where.since == -math.inf else where.since
    until = None if where.until == math.inf else where.until
    return replace(where, since=since, until=until)


def split_days(since: float | None, until: float | None) -> DaySplit:
    """Cut `[since, until)` into whole days and the rest at its edges; no moment is in two parts."""
    if since == math.inf or until == -math.inf:
        return DaySplit(0, 0, ())
    first = None if since is None else -int(-since // DAY_S)
    end = None if until is None else day_of(until)
    if first is not None and end is not None and first >= end:
        return DaySplit(0, 0, ((since, until),))
    edges: list[tuple[float | None, float | None]] = []
    if since is not None and first is not None and since < first * DAY_S:
        edges.append((since, float(first * DAY_S)))
    if until is not None and end is not None and end * DAY_S < until:
        edges.append((float(end * DAY_S), until))
    return DaySplit(first, end, tuple(edges))


def matches(where: UsageFilter, record: RequestRecord) -> bool:
    return (
        (where.since is None or where.since <= record.ended_at)
        and (where.until is None or record.ended_at < where.until)
        and where.function in (None, record.function)
        and where.tenant in (None, record.tenant)
    )


def overlaps(interval: InstanceInterval, since: float | None, until: float | None) -> bool:
    """Return whether the interval has a moment in `[since, until)`; an empty one counts by its start."""
    return (until is None or interval.from_at < until) and (
        since is None or since < interval.to_at or since <= interval.from_at
    )


async def in_window(
    pages: AsyncIterator[list[InstanceInterval]], since: float | None, until: float | None
) -> list[InstanceInterval]:
    """Return the intervals of `pages` with a moment in `[since, until)`, by their start."""
    found = [one async for page in pages for one in page if overlaps(one, since, until)]
    return sorted(found, key=lambda one: (one.from_at, one.instance_id, one.state))


def by_end(intervals: Iterable[InstanceInterval]) -> list[InstanceInterval]:
    """Return the intervals in the order of their ends; of those that end together an empty one comes last."""
    return sorted(intervals, key=lambda one: (one.to_at, one.from_at))


def parse_by(text: str, properties: Sequence[str]) -> tuple[str, ...]:
    """Return the properties of `tenant,day`, to group by. Raises InvalidRecord."""
    by = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in by if name not in properties]
    if unknown:
        raise InvalidRecord(f"cannot group by {unknown[0]!r}: use {', '.join(properties)}")
    if len(set(by)) < len(by):
        raise InvalidRecord("a property to group by is named twice")
    return by


def amounts_of(record: RequestRecord) -> tuple[int, ...]:
    """Return what the record adds to the sums, in the order of COLUMNS."""
    return 1, record.prompt_tokens, record.completion_tokens, record.billed_gpu_ms, record.cost_nanos


class UsageTotals:
    """Totals by function and tenant."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], list[int]] = {}

    def add(self, function: str, tenant: str, amounts: Iterable[int]) -> None:
        sums = self._sums.setdefault((function, tenant), [0] * len(COLUMNS))
        sums[:] = map(add, sums, amounts)

    def add_all(self, tallies: Iterable[Tally]) -> None:
        """Add sums by function and tenant."""
        for (function, tenant), amounts in tallies:
            self.add(str(function), str(tenant), amounts)

    def rows(self) -> list[UsageRow]:
        """Return one row for each function and tenant, ordered by both."""
        return [
            UsageRow(function=function, tenant=tenant, **dict(zip(COLUMNS, sums, strict=True)))
            for (function, tenant), sums in sorted(self._sums.items(), key=lambda item: item[0])
        ]
