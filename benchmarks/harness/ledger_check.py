"""Comparison of a ledger with a client's view: one record per request, correct tokens, correct sums."""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from benchmarks.harness.admin_client import USAGE_SUMS
from benchmarks.harness.stream_client import StreamResult

_AT_ONCE = 8


class UsageReports(Protocol):
    """The reports of a platform that are compared: see AdminClient."""

    async def usage_record(self, request_id: str) -> dict[str, Any] | None: ...

    async def usage_sums(self, since: float, until: float) -> dict[str, int]: ...

    async def reconciliation(self, functions: Sequence[str], wait_s: float) -> str: ...

    async def gpu_time(self, since: float, until: float) -> dict[str, int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerComparison:
    """Counts of ledger records that differ from what a client saw.

    `reconciliation` is the verdict of the usage check; `open` means that it is not settled yet.
    """

    records: int
    missing: int
    wrong_tokens: int
    wrong_status: int
    sums_equal: bool
    reconciliation: str

    @property
    def ok(self) -> bool | None:
        """None while time of live instances is not settled and nothing is wrong so far."""
        right = not (self.missing or self.wrong_tokens or self.wrong_status) and self.sums_equal
        if not right or self.reconciliation == "wrong":
            return False
        return True if self.reconciliation == "exact" else None

    def record(self) -> dict[str, Any]:
        return asdict(self)


async def compare_ledger(
    admin: UsageReports, functions: Sequence[str], finished: Sequence[StreamResult], *, wait_s: float
) -> LedgerComparison:
    """Look up every request and compare sums; no other client may use the key meanwhile."""
    turn = asyncio.Semaphore(_AT_ONCE)

    async def look_up(done: StreamResult) -> dict[str, Any] | None:
        async with turn:
            return await admin.usage_record(done.request_id)

    found = await asyncio.gather(*(look_up(done) for done in finished))
    there = [record for record in found if record is not None]
    good = [(done, record) for done, record in zip(finished, found, strict=True) if not done.failure]
    return LedgerComparison(
        records=len(there),
        missing=sum(record is None for _, record in good),
        wrong_tokens=sum(
            (record["prompt_tokens"], record["completion_tokens"])
            != (done.prompt_tokens, done.completion_tokens)
            for done, record in good
            if record is not None
        ),
        wrong_status=sum(record["status"] != "ok" for _, record in good if record is not None),
        sums_equal=await _sums_equal(admin, there),
        reconciliation=await admin.reconciliation(functions, wait_s),
    )


async def _sums_equal(admin: UsageReports, records: Sequence[dict[str, Any]]) -> bool:
    """Return whether the report over these records' time span contains exactly these records."""
    if not records:
        return True
    ends = [record["ended_at"] for record in records]
    expected = {name: sum(record.get(name, 1) for record in records) for name in USAGE_SUMS}
    return await admin.usage_sums(min(ends), max(ends) + 1e-3) == expected
