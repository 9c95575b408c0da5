"""What has to hold after any fault: clients' answers, the ledger against them, and the ledger by itself."""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.chaos_cluster import Cluster, Kind, Part
from benchmarks.chaos_load import MODEL, Asked, Fate
from registry.conservation import Conservation, Verdict, conservation
from registry.ledger_pages import each_request
from registry.state import Ledger, UsageFilter
from registry.usage import InstanceInterval, LostCall, RequestRecord, RequestStatus

# Gateways learn within a moment that Redis is back, and clients' clocks are read a moment late.
_AFTER_S = 2.0
_SHOWN = 20
_HOPELESS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """A part was away in `[from_s, to_s)` of `time.monotonic`."""

    part: Part
    from_s: float
    to_s: float

    def overlaps(self, asked: Asked) -> bool:
        return asked.sent_s < self.to_s + _AFTER_S and asked.ended_s >= self.from_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """The whole ledger."""

    records: Sequence[RequestRecord]
    intervals: Sequence[InstanceInterval]
    lost: Sequence[LostCall]

    def conservation(self) -> Conservation:
        return conservation(self.records, self.intervals, self.lost)


async def read_books(ledger: Ledger) -> Books:
    """Raises StateUnavailable."""
    return Books(
        records=[record async for record in each_request(ledger, UsageFilter())],
        intervals=await ledger.intervals(),
        lost=await ledger.lost_calls(),
    )


async def final_books(cluster: Cluster, within_s: float) -> Books:
    """The ledger once it adds up, or as it is by then if it does not."""
    deadline_s = time.monotonic() + within_s
    async with cluster.state() as state:
        while True:
            books = await read_books(state)
            if books.conservation().verdict is Verdict.EXACT or time.monotonic() > deadline_s:
                return books
            await asyncio.sleep(1.0)


def wrong_answers(asked: Iterable[Asked], outages: Sequence[Outage], gateways: Sequence[Part]) -> list[str]:
    """Answers that no outage excuses."""
    away: dict[Part, list[Outage]] = defaultdict(list)
    for outage in outages:
        away[outage.part].append(outage)
    of_kind = {kind: [one for one in outages if one.part.kind is kind] for kind in Kind}
    of_all, of_redis = of_kind[Kind.SUPERVISOR], of_kind[Kind.REDIS]
    failed = []
    for one in asked:
        match one.fate:
            case Fate.ACKNOWLEDGED | Fate.LEFT:
                continue
            case Fate.CUT | Fate.UNREACHED:
                excuses = [*of_all, *away[gateways[one.gateway]]]
            case Fate.REFUSED:
                # A gateway that has just started does not know the cluster yet.
                excuses = [*of_all, *of_redis, *away[gateways[one.gateway]]]
            case Fate.FAILED if one.code in ("billing_failed", "state_unavailable"):
                excuses = [*of_all, *of_redis]
            case Fate.FAILED if one.code == "function_error":
                excuses = of_kind[Kind.HANDLER]
            case Fate.FAILED | Fate.HUNG:
                excuses = of_all  # gateways hold requests for the seconds before there are nodes
            case _:
                excuses = []
        if not any(outage.overlaps(one) for outage in excuses):
            failed.append(str(one))
    return failed


def wrong_books(asked: Sequence[Asked], records: Iterable[RequestRecord]) -> list[str]:
    """Requests that the ledger does not hold as their clients saw them.

    Where a client used an id again, each of its requests that was acknowledged has a row of its own.
    """
    rows: dict[str, list[RequestRecord]] = defaultdict(list)
    for record in records:
        rows[record.request_id.partition("~")[0]].append(record)
    by_id: dict[str, list[Asked]] = defaultdict(list)
    for one in asked:
        by_id[one.request_id].append(one)
    failed = []
    for request_id, same in by_id.items():
        mine = rows.pop(request_id, [])
        if len(mine) > len(same):
            failed.append(f"{request_id} is {len(mine)} times in the ledger, and was asked {len(same)} times")
        for one in (one for one in same if one.fate is Fate.ACKNOWLEDGED):
            fitting = next((row for row in mine if not _difference(one, row)), None)
            if fitting is not None:
                mine.remove(fitting)
            else:
                found = "; ".join(_difference(one, row) for row in mine)
                failed.append(f"{one}: {found or 'not in the ledger'}")
    return [*failed, *(f"{name} is in the ledger, and nobody asked for it" for name in rows)]


def _difference(asked: Asked, row: RequestRecord) -> str:
    """What a row says otherwise than the client."""
    told = (asked.tenant, asked.function, asked.prompt_tokens, asked.completion_tokens, RequestStatus.OK)
    has = (row.tenant, row.function, row.prompt_tokens, row.completion_tokens, row.status)
    if told != has and not (asked.function != MODEL and told[:2] == has[:2] and told[4] == has[4]):
        return f"the ledger has {has}, not {told}"
    if row.billed_gpu_ms != -(-sum(part.gpu_us for part in row.gpu) // 1000):
        return f"billed {row.billed_gpu_ms} ms for {row.gpu}"
    return ""


def wrong_sums(report: Iterable[Mapping[str, object]], records: Iterable[RequestRecord]) -> list[str]:
    """Where `usage report` is not the sum of the rows."""
    columns = ("prompt_tokens", "completion_tokens", "billed_gpu_ms", "cost_nanos")
    sums: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for record in records:
        row = sums[record.function, record.tenant]
        row.update({name: getattr(record, name) for name in columns} | {"requests": 1})
    told = {
        (str(row["function"]), str(row["tenant"])): {name: row[name] for name in ("requests", *columns)}
        for row in report
    }
    return [
        f"the report has {told.get(name)} for {name}, its rows sum up to {dict(sums.get(name, {}))}"
        for name in sorted({*told, *sums})
        if told.get(name) != {column: sums[name][column] for column in ("requests", *columns)}
    ]


@dataclass(slots=True)
class Findings:
    """What was found wrong, of which the first of each kind are kept."""

    failed: list[str] = field(default_factory=list)
    count: int = 0

    @property
    def hopeless(self) -> bool:
        """Whether it makes no sense to go on."""
        return self.count >= _HOPELESS

    def add(self, found: Sequence[str]) -> None:
        self.count += len(found)
        self.failed += found[:_SHOWN]
