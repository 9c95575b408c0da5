"""GPU time over time: allocated, used by requests, spent on loading, idle. Pure.

All of it is from the intervals that nodes record, in whole microseconds. An amount of an interval
`[start, end)` is spread over it evenly and cut at the edges of buckets cumulatively: its parts add up to it
exactly, wherever it is cut. In each row allocated = used + loading + idle:

- `used_ms` is the metered time of requests.
- `attributed_ms` is what of it is billed: each request is rounded up once, so that it may be more.
- `loading_ms` is as the nodes metered it. It and idle time belong to no tenant.
- `idle_ms` is the rest of the allocated time, including lost time and time of calls in flight.
- `lost_ms` is the part of it that calls used without a record.

The contribution of an interval depends on it and the records of its calls alone. So sums are the same by any
grouping, at any resolution, and over any spans that together make one up. Rows are rounded to whole
milliseconds cumulatively, so that their sums are rounded once.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from registry.accounting.gpu_shares import BusyShares
from registry.accounting.reconciliation import micros
from registry.accounting.usage_groups import MAX_ROWS
from registry.errors import InvalidRecord
from registry.records.usage import InstanceInterval, LostCall

PROPERTIES = ("function", "tenant", "node")
RESOLUTIONS_S = {"1m": 60, "1h": 3600, "1d": 86_400}
COLUMNS = (
    "from",
    "to",
    *PROPERTIES,
    "allocated_ms",
    "used_ms",
    "attributed_ms",
    "loading_ms",
    "idle_ms",
    "lost_ms",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketedSpan:
    """The span `[since_us, until_us)` (None: unbounded), cut at whole multiples of `step_us` (0: uncut)."""

    since_us: int | None = None
    until_us: int | None = None
    step_us: int = 0

    def parts(self, start_us: int, end_us: int, amount: int) -> Iterator[tuple[int, int]]:
        """Yield (bucket, part) of an amount that was used evenly over `[start_us, end_us)`."""
        if not amount:
            return
        low = start_us if self.since_us is None else max(start_us, self.since_us)
        high = max(end_us, start_us)
        high = high if self.until_us is None else min(high, self.until_us)
        if start_us >= end_us:  # an empty interval
            if low == start_us and (self.until_us is None or start_us < self.until_us):
                yield self.bucket(start_us), amount
            return
        length = end_us - start_us
        at, before = low, amount * (low - start_us) // length
        while at < high:
            bucket = self.bucket(at)
            end = min(high, (bucket + 1) * self.step_us) if self.step_us else high
            after = amount * (end - start_us) // length
            yield bucket, after - before
            at, before = end, after

    def bucket(self, at_us: int) -> int:
        return at_us // self.step_us if self.step_us else 0

    def edges(self, bucket: int, first_us: int, last_us: int) -> tuple[float, float]:
        """Return the bucket's edges as Unix seconds; an unbounded one has the first and last moment."""
        low = first_us if self.since_us is None else self.since_us
        high = last_us if self.until_us is None else self.until_us
        if self.step_us:
            low = max(bucket * self.step_us, 0 if self.since_us is None else self.since_us)
            end = (bucket + 1) * self.step_us
            high = end if self.until_us is None else min(end, self.until_us)
        return low / 1e6, high / 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRow:
    """Accelerator time of one bucket and group; a property that is not grouped by is None."""

    from_at: float
    to_at: float
    function: str | None
    tenant: str | None
    node: str | None
    used_ms: int
    attributed_ms: int
    loading_ms: int
    idle_ms: int
    lost_ms: int

    @property
    def allocated_ms(self) -> int:
        """The sum of the used, loading and idle time."""
        return self.used_ms + self.loading_ms + self.idle_ms


@dataclass(slots=True)
class GpuSums:
    """The microseconds of one bucket and group."""

    used_us: int = 0
    billed_us: int = 0
    loading_us: int = 0
    idle_us: int = 0
    lost_us: int = 0


Group = tuple[str, ...]


@dataclass(slots=True)
class GpuTime:
    """Adds GPU time up. Feed it each interval once, with its attributed busy time, then read the rows.

    With `tenant` it has only the rows of that tenant's requests, with `function` those of one function.
    """

    span: BucketedSpan
    by: Sequence[str]
    function: str | None = None
    tenant: str | None = None
    sums: dict[tuple[int, Group], GpuSums] = field(default_factory=dict)
    _first_us: int | None = None
    _last_us: int = 0

    def add(self, interval: InstanceInterval, busy: BusyShares) -> None:
        """Add an interval. Raises InvalidRecord where there would be too many rows."""
        if self.function not in (None, interval.function):
            return
        start_us, end_us = micros(interval.from_at), micros(interval.to_at)
        self._first_us = start_us if self._first_us is None else min(self._first_us, start_us)
        self._last_us = max(self._last_us, end_us)
        for tenant, use in busy.tenants.items():
            if self.tenant in (None, tenant):
                for sums, us in self._parts(interval, tenant, use.used_us):
                    sums.used_us += us
                for sums, us in self._parts(interval, tenant, use.billed_us):
                    sums.billed_us += us
        if self.tenant is None:
            for sums, us in self._parts(interval, "", interval.loading_us):
                sums.loading_us += us
            for sums, us in self._parts(interval, "", interval.idle_us + busy.open_us):
                sums.idle_us += us
            for sums, us in self._parts(interval, "", busy.lost_us):
                sums.idle_us += us
                sums.lost_us += us

    def rows(self) -> list[GpuRow]:
        """Return the rows, by time and group."""
        return list(self._in_ms())

    def _parts(
        self, interval: InstanceInterval, tenant: str, amount_us: int
    ) -> Iterator[tuple[GpuSums, int]]:
        group = self._group(interval.function, tenant, interval.node)
        start_us, end_us = micros(interval.from_at), micros(interval.to_at)
        for bucket, part_us in self.span.parts(start_us, end_us, amount_us):
            sums = self.sums.get((bucket, group))
            if sums is None:
                if len(self.sums) == MAX_ROWS:
                    raise InvalidRecord(
                        f"more than {MAX_ROWS} rows: narrow the time, or take a coarser resolution"
                    )
                sums = self.sums[bucket, group] = GpuSums()
            yield sums, part_us

    def _in_ms(self) -> Iterator[GpuRow]:
        names = ("used_us", "billed_us", "loading_us", "idle_us", "lost_us")
        totals = dict.fromkeys(names, 0)
        for (bucket, group), sums in sorted(self.sums.items(), key=lambda item: item[0]):
            ms = {}
            for name in names:
                before_ms = _ms(totals[name])
                totals[name] += getattr(sums, name)
                ms[name] = _ms(totals[name]) - before_ms
            from_at, to_at = self.span.edges(bucket, self._first_us or 0, self._last_us)
            values: dict[str, str | None] = dict.fromkeys(PROPERTIES)
            values |= dict(zip(self.by, group, strict=True))
            yield GpuRow(
                from_at=from_at,
                to_at=to_at,
                function=values["function"],
                tenant=values["tenant"],
                node=values["node"],
                used_ms=ms["used_us"],
                attributed_ms=ms["billed_us"],
                loading_ms=ms["loading_us"],
                idle_ms=ms["idle_us"],
                lost_ms=ms["lost_us"],
            )

    def _group(self, function: str, tenant: str, node: str) -> Group:
        values = {"function": function, "tenant": tenant, "node": node}
        return tuple(values[name] for name in self.by)


def _ms(total_us: int) -> int:
    return (total_us + 500) // 1000


def lost_by_call(lost: Iterable[LostCall]) -> dict[tuple[str, str], int]:
    """Return the microseconds that each call used without a record, by call and instance."""
    found: dict[tuple[str, str], int] = {}
    for call in lost:
        name = call.call_id, call.instance_id
        found[name] = max(call.used_us, found.get(name, 0))
    return found
