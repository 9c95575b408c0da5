"""Invariants after faults: clients' responses, the ledger against them, and the ledger by itself."""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.chaos.load import MODEL, IssuedRequest, RequestFate
from benchmarks.harness.local_platform import Component, ComponentKind, LocalPlatform
from registry.accounting.ledger_pages import each_request
from registry.accounting.reconciliation import BalanceVerdict, Reconciliation, reconcile
from registry.records.usage import InstanceInterval, LostCall, RequestRecord, RequestStatus
from registry.state import Ledger, UsageFilter

# Gateways notice Redis's return with a delay, and clients read their clocks late.
_GRACE_S = 2.0
_MAX_SHOWN = 20
_MAX_FINDINGS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """A component was unavailable in `[from_s, to_s)` of `time.monotonic`."""

    component: Component
    from_s: float
    to_s: float

    def overlaps(self, issued: IssuedRequest) -> bool:
        return issued.sent_s < self.to_s + _GRACE_S and issued.ended_s >= self.from_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSnapshot:
    """The whole ledger."""

    records: Sequence[RequestRecord]
    intervals: Sequence[InstanceInterval]
    lost: Sequence[LostCall]

    def reconcile(self) -> Reconciliation:
        return reconcile(self.records, self.intervals, self.lost)

    def summary(self, balance: Reconciliation) -> dict[str, Any]:
        """Return what a record says about the ledger and its reconciliation."""
        sums = {
            name: sum(getattr(one, name) for one in balance.instances)
            for name in ("busy_us", "used_us", "lost_us")
        }
        counts = {"rows": len(self.records), "lost_calls": len(self.lost)}
        return {**counts, **sums, "verdict": str(balance.verdict)}


async def read_ledger(ledger: Ledger) -> LedgerSnapshot:
    """Read the ledger. Raises StateUnavailable."""
    return LedgerSnapshot(
        records=[record async for record in each_request(ledger, UsageFilter())],
        intervals=await ledger.intervals(),
        lost=await ledger.lost_calls(),
    )


async def wait_for_ledger(platform: LocalPlatform, within_s: float) -> LedgerSnapshot:
    """Return the ledger once it is exact, or its last state after `within_s`."""
    deadline_s = time.monotonic() + within_s
    async with platform.state() as state:
        while True:
            books = await read_ledger(state)
            if books.reconcile().verdict is BalanceVerdict.EXACT or time.monotonic() > deadline_s:
                return books
            await asyncio.sleep(1.0)


def wrong_answers(
    issued: Iterable[IssuedRequest], outages: Sequence[Outage], gateways: Sequence[Component]
) -> list[str]:
    """Return responses that no outage excuses."""
    away: dict[Component, list[Outage]] = defaultdict(list)
    for outage in outages:
        away[outage.component].append(outage)
    of_kind = {kind: [one for one in outages if one.component.kind is kind] for kind in ComponentKind}
    of_all, of_redis = of_kind[ComponentKind.SUPERVISOR], of_kind[ComponentKind.REDIS]
    failed = []
    for one in issued:
        match one.fate:
            case RequestFate.ACKNOWLEDGED | RequestFate.LEFT:
                continue
            case RequestFate.CUT | RequestFate.UNREACHED:
                excuses = [*of_all, *away[gateways[one.gateway]]]
            case RequestFate.REFUSED:
                # A gateway that has just started has no cluster state yet.
                excuses = [*of_all, *of_redis, *away[gateways[one.gateway]]]
            case RequestFate.FAILED if one.code in ("billing_failed", "state_unavailable"):
                excuses = [*of_all, *of_redis]
            case RequestFate.FAILED if one.code == "function_error":
                excuses = of_kind[ComponentKind.HANDLER]
            case RequestFate.FAILED | RequestFate.HUNG:
                excuses = of_all  # gateways queue requests until nodes are registered
            case _:
                excuses = []
        if not any(outage.overlaps(one) for outage in excuses):
            failed.append(str(one))
    return failed


def ledger_mismatches(issued: Sequence[IssuedRequest], records: Iterable[RequestRecord]) -> list[str]:
    """Return requests that the ledger does not hold as their clients saw them.

    Where a client reused an id, each of its acknowledged requests has a row of its own.
    """
    rows: dict[str, list[RequestRecord]] = defaultdict(list)
    for record in records:
        rows[record.response_id].append(record)
    by_id: dict[str, list[IssuedRequest]] = defaultdict(list)
    for one in issued:
        by_id[one.request_id].append(one)
    failed = []
    for request_id, same in by_id.items():
        mine = rows.pop(request_id, [])
        if len(mine) > len(same):
            failed.append(f"{request_id} is in the ledger {len(mine)} times, but was sent {len(same)} times")
        for one in (one for one in same if one.fate is RequestFate.ACKNOWLEDGED):
            fitting = next((row for row in mine if not _difference(one, row)), None)
            if fitting is not None:
                mine.remove(fitting)
            else:
                found = "; ".join(_difference(one, row) for row in mine)
                failed.append(f"{one}: {found or 'not in the ledger'}")
    return [*failed, *(f"{name} is in the ledger, but no client sent it" for name in rows)]


def _difference(issued: IssuedRequest, row: RequestRecord) -> str:
    """Return how a row differs from the client's view."""
    expected = (
        issued.tenant,
        issued.function,
        issued.prompt_tokens,
        issued.completion_tokens,
        RequestStatus.OK,
    )
    has = (row.tenant, row.function, row.prompt_tokens, row.completion_tokens, row.status)
    if expected != has and not (
        issued.function != MODEL and expected[:2] == has[:2] and expected[4] == has[4]
    ):
        return f"the ledger has {has}, not {expected}"
    if row.billed_gpu_ms != -(-sum(one.gpu_us for one in row.gpu) // 1000):
        return f"billed {row.billed_gpu_ms} ms for {row.gpu}"
    return ""


def wrong_sums(report: Iterable[Mapping[str, object]], records: Iterable[RequestRecord]) -> list[str]:
    """Return where `usage report` is not the sum of the rows."""
    columns = ("prompt_tokens", "completion_tokens", "billed_gpu_ms", "cost_nanos")
    sums: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for record in records:
        row = sums[record.function, record.tenant]
        row.update({name: getattr(record, name) for name in columns} | {"requests": 1})
    reported = {
        (str(row["function"]), str(row["tenant"])): {name: row[name] for name in ("requests", *columns)}
        for row in report
    }
    return [
        f"the report has {reported.get(name)} for {name}, its rows sum up to {dict(sums.get(name, {}))}"
        for name in sorted({*reported, *sums})
        if reported.get(name) != {column: sums[name][column] for column in ("requests", *columns)}
    ]


@dataclass(slots=True)
class Findings:
    """Violations found; the first of each kind are kept."""

    failed: list[str] = field(default_factory=list)
    count: int = 0

    @property
    def too_many(self) -> bool:
        """Whether continuing makes no sense."""
        return self.count >= _MAX_FINDINGS

    def add(self, found: Sequence[str]) -> None:
        self.count += len(found)
        self.failed += found[:_MAX_SHOWN]
