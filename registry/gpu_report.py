"""GPU time over time: what was allocated, used by requests, spent on loading, idle. Pure.

Everything is counted in whole microseconds. An amount that a span of time `[start, end)` used is spread
over it evenly, cut at the edges of buckets cumulatively, so that its parts add up to it exactly, and
what is too much for a bucket goes to the next (gpu_fit). In each row allocated = used + loading + idle:

- `attributed_ms` is what requests were billed: their slices, each request rounded up once.
- `loading_ms` is as the nodes metered it. It and idle time belong to no tenant.
- `idle_ms` is the rest of what was allocated, lost time and time of calls in flight included. (Where
  requests used more than is metered, as an interval is not written yet, that counts as allocated.)
- `lost_ms` is the part of it that calls used without a record.

Times are split between instances and buckets before rows are made of them, so that a sum is the same by
any grouping; and rounded to whole milliseconds cumulatively, so that the rows' sums are rounded once.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from registry.conservation import LostCalls, micros
from registry.errors import InvalidRecord
from registry.gpu_fit import Use, Uses, fit
from registry.usage import InstanceInterval, LostCall, RequestRecord

PROPERTIES = ("function", "tenant", "node")
RESOLUTIONS_S = {"1m": 60, "1h": 3600, "1d": 86_400}
COLUMNS = (
    "from",
    "to",
    *PROPERTIES,
    "allocated_ms",
    "attributed_ms",
    "loading_ms",
    "idle_ms",
    "lost_ms",
)
# Rows that an answer may have, and pieces of time that may be counted for it.
MAX_ROWS = 20_000
MAX_CELLS = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """`[since_us, until_us)`, cut at whole multiples of `step_us` (0: not at all). None: unbounded."""

    since_us: int | None = None
    until_us: int | None = None
    step_us: int = 0

    def parts(self, start_us: int, end_us: int, amount: int) -> Iterator[tuple[int, int]]:
        """(bucket, its part) of an amount that was used evenly over `[start_us, end_us)`."""
        if not amount:
            return
        low = start_us if self.since_us is None else max(start_us, self.since_us)
        high = max(end_us, start_us)
        high = high if self.until_us is None else min(high, self.until_us)
        if start_us >= end_us:  # a moment
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
        """The bucket as Unix seconds; without bounds it reaches from the first moment to the last."""
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
    allocated_ms: int
    attributed_ms: int
    loading_ms: int
    idle_ms: int
    lost_ms: int


@dataclass(slots=True)
class _Cell:
    """What is metered of one instance in one bucket; `room_us` is for requests, or idle."""

    room_us: int = 0
    loading_us: int = 0
    lost_us: int = 0


@dataclass(slots=True)
class _Instance:
    """One instance of a function on a node, by bucket; its uses by tenant too."""

    cells: dict[int, _Cell] = field(default_factory=lambda: defaultdict(_Cell))
    uses: dict[int, Uses] = field(default_factory=lambda: defaultdict(lambda: defaultdict(Use)))


@dataclass(slots=True)
class _Sums:
    used_us: int = 0
    billed_us: int = 0
    loading_us: int = 0
    idle_us: int = 0
    lost_us: int = 0


@dataclass(slots=True)
class _Edges:
    """The first and the last moment seen."""

    first_us: int | None = None
    last_us: int = 0

    def note(self, start_us: int, end_us: int) -> None:
        self.first_us = start_us if self.first_us is None else min(self.first_us, start_us)
        self.last_us = max(self.last_us, end_us)


@dataclass(slots=True)
class GpuTime:
    """Adds GPU time up. Feed it the intervals, then each record, then ask for the rows.

    With `tenant` there are only the rows of that tenant's requests, with `function` those of one function.
    """

    span: Span
    by: Sequence[str]
    lost: LostCalls = field(default_factory=lambda: LostCalls(()))
    function: str | None = None
    tenant: str | None = None
    _instances: dict[tuple[str, str, str], _Instance] = field(default_factory=lambda: defaultdict(_Instance))
    _cells: int = 0
    _edges: _Edges = field(default_factory=_Edges)

    def add_intervals(self, intervals: Iterable[InstanceInterval]) -> None:
        """Count what instances were allocated."""
        for interval in intervals:
            if self.function not in (None, interval.function):
                continue
            start_us, end_us = micros(interval.from_at), micros(interval.to_at)
            self._edges.note(start_us, end_us)
            instance = self._instances[interval.function, interval.node, interval.instance_id]
            room_us = interval.busy_us + interval.idle_us
            for bucket, part in self.span.parts(start_us, end_us, room_us):
                self._cell(instance, bucket).room_us += part
            for bucket, part in self.span.parts(start_us, end_us, interval.loading_us):
                self._cell(instance, bucket).loading_us += part

    def add(self, record: RequestRecord) -> None:
        """Count what a request used."""
        self.lost.add(record)
        if self.function not in (None, record.function):
            return
        start_us, end_us = micros(record.started_at), micros(record.ended_at)
        self._edges.note(start_us, end_us)
        for node, instance_id, used_us, billed_us in _uses(record):
            uses = self._instances[record.function, node, instance_id].uses
            for bucket, part in self.span.parts(start_us, end_us, used_us):
                uses[bucket][record.tenant].used_us += part
            for bucket, part in self.span.parts(start_us, end_us, billed_us):
                uses[bucket][record.tenant].billed_us += part

    def rows(self) -> list[GpuRow]:
        """The rows, by time and group; ask once. Raises InvalidRecord where there would be too many."""
        self._add_lost()
        groups: dict[tuple[int, tuple[str, ...]], _Sums] = defaultdict(_Sums)
        for (function, node, _), instance in self._instances.items():
            room_us = {bucket: cell.room_us for bucket, cell in instance.cells.items()}
            uses = fit(room_us, instance.uses)
            for bucket, of_bucket in uses.items():
                for tenant, use in of_bucket.items():
                    if self.tenant in (None, tenant):
                        sums = groups[bucket, self._group(function, tenant, node)]
                        sums.used_us += use.used_us
                        sums.billed_us += use.billed_us
            if self.tenant is None:
                for bucket, cell in instance.cells.items():
                    used_us = sum(use.used_us for use in uses.get(bucket, {}).values())
                    sums = groups[bucket, self._group(function, "", node)]
                    sums.loading_us += cell.loading_us
                    sums.idle_us += max(0, cell.room_us - used_us)
                    sums.lost_us += cell.lost_us
        if len(groups) > MAX_ROWS:
            raise InvalidRecord(f"more than {MAX_ROWS} rows: narrow the time, or take a coarser resolution")
        return list(self._in_ms(groups))

    def _in_ms(self, groups: dict[tuple[int, tuple[str, ...]], _Sums]) -> Iterator[GpuRow]:
        names = ("used_us", "billed_us", "loading_us", "idle_us", "lost_us")
        totals = dict.fromkeys(names, 0)
        for (bucket, group), sums in sorted(groups.items()):
            ms = {}
            for name in names:
                before_ms = _ms(totals[name])
                totals[name] += getattr(sums, name)
                ms[name] = _ms(totals[name]) - before_ms
            from_at, to_at = self.span.edges(bucket, self._edges.first_us or 0, self._edges.last_us)
            values: dict[str, str | None] = dict.fromkeys(PROPERTIES)
            values |= dict(zip(self.by, group, strict=True))
            yield GpuRow(
                from_at=from_at,
                to_at=to_at,
                function=values["function"],
                tenant=values["tenant"],
                node=values["node"],
                allocated_ms=ms["used_us"] + ms["loading_us"] + ms["idle_us"],
                attributed_ms=ms["billed_us"],
                loading_ms=ms["loading_us"],
                idle_ms=ms["idle_us"],
                lost_ms=ms["lost_us"],
            )

    def _add_lost(self) -> None:
        for call, lost_us in self.lost.unrecorded():
            if lost_us and self.function in (None, call.function):
                at_us = micros(call.ended_at)
                instance = self._instances[call.function, call.node, call.instance_id]
                for bucket, part in self.span.parts(at_us, at_us, lost_us):
                    self._cell(instance, bucket).lost_us += part

    def _group(self, function: str, tenant: str, node: str) -> tuple[str, ...]:
        values = {"function": function, "tenant": tenant, "node": node}
        return tuple(values[name] for name in self.by)

    def _cell(self, instance: _Instance, bucket: int) -> _Cell:
        if bucket not in instance.cells:
            self._cells += 1
            if self._cells > MAX_CELLS:
                raise InvalidRecord("too much time at this resolution: narrow it, or take a coarser one")
        return instance.cells[bucket]


def _ms(total_us: int) -> int:
    return (total_us + 500) // 1000


def parse_by(text: str) -> tuple[str, ...]:
    """`function,node` as properties to group by. Raises InvalidRecord."""
    by = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in by if name not in PROPERTIES]
    if unknown:
        raise InvalidRecord(f"cannot group by {unknown[0]!r}: use some of {', '.join(PROPERTIES)}")
    if len(set(by)) < len(by):
        raise InvalidRecord("a property to group by is named twice")
    return by


def gpu_time(
    records: Iterable[RequestRecord],
    intervals: Iterable[InstanceInterval],
    lost: Iterable[LostCall] = (),
    *,
    by: Sequence[str] = (),
    span: Span | None = None,
) -> list[GpuRow]:
    """The rows of a whole ledger; see `GpuTime`."""
    time = GpuTime(span=span or Span(), by=by, lost=LostCalls(lost))
    time.add_intervals(intervals)
    for record in records:
        time.add(record)
    return time.rows()


def _uses(record: RequestRecord) -> Iterator[tuple[str, str, int, int]]:
    """(node, instance, microseconds used, microseconds billed) of each slice of a request."""
    billed_us = record.billed_gpu_ms * 1000
    used_us = sum(part.gpu_us for part in record.gpu)
    if not used_us:  # a record of before slices were kept, or nothing was used
        if billed_us:
            yield record.node, "", billed_us, billed_us
        return
    done_us = done_billed_us = 0
    for part in record.gpu:
        done_us += part.gpu_us
        share_us = billed_us * done_us // used_us - done_billed_us
        done_billed_us += share_us
        yield part.node, part.instance_id, part.gpu_us, share_us
