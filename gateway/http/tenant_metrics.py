"""Prometheus metrics by tenant, for a bounded number of tenants."""

from collections import Counter as Tally

from prometheus_client import CollectorRegistry

from gateway.http.collectors import Tallied
from registry.records.usage import RequestRecord

OTHERS = "@others"  # no tenant's name begins with an @
_NANOS = 10**9


class TenantMetrics:
    """Counters of what tenants were billed: of the first `most` that call, and of all others together.

    A row stays until the gateway ends, so that their number is bounded.
    """

    def __init__(self, registry: CollectorRegistry, most: int) -> None:
        self._most = most
        self._named: set[str] = set()
        self._requests: Tally[tuple[str, ...]] = Tally()  # by tenant and status
        self._tokens: Tally[tuple[str, ...]] = Tally()  # by tenant and kind
        self._gpu_ms: Tally[tuple[str, ...]] = Tally()
        self._cost_nanos: Tally[tuple[str, ...]] = Tally()
        self._limited: Tally[tuple[str, ...]] = Tally()
        for name, text, more, counts, parts in (
            ("requests", "Billed requests by how they ended.", ("status",), self._requests, 1),
            ("tokens", "Tokens of billed requests.", ("kind",), self._tokens, 1),
            ("gpu_seconds", "Accelerator time of billed requests.", (), self._gpu_ms, 1000),
            ("cost", "Cost, in the unit of the price table's currency.", (), self._cost_nanos, _NANOS),
            ("limited_requests", "Requests refused by the limits of a key (429).", (), self._limited, 1),
        ):
            registry.register(Tallied(f"hypercast_tenant_{name}", text, ("tenant", *more), counts, parts))

    def __repr__(self) -> str:
        return f"<TenantMetrics of {len(self._named)} of {self._most} tenants>"

    def note(self, record: RequestRecord) -> None:
        """Count a request that is in the ledger."""
        tenant = self._row(record.tenant)
        self._requests[tenant, record.status.value] += 1
        self._tokens[tenant, "prompt"] += record.prompt_tokens
        self._tokens[tenant, "completion"] += record.completion_tokens
        self._gpu_ms[tenant,] += record.billed_gpu_ms
        self._cost_nanos[tenant,] += record.cost_nanos
        self._limited[tenant,] += 0

    def note_limited(self, tenant: str) -> None:
        """Count a request that the limits of a key refused."""
        self._limited[self._row(tenant),] += 1

    def _row(self, tenant: str) -> str:
        if tenant not in self._named:
            if len(self._named) >= self._most:
                return OTHERS
            self._named.add(tenant)
        return tenant
