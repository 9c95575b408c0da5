"""Quotas in one process, as in `registry.redis.quota`."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from registry.clock import Clock
from registry.records.api_key import ApiKey, SpendPeriod
from registry.records.quota import (
    MAX_CONCURRENCY_LEASE_S,
    UNITS,
    ConcurrencyLease,
    RateLimitDecision,
    RateLimitOutcome,
    drained,
    judge,
    spend_field,
)
from registry.records.usage import RequestRecord


@dataclass(slots=True)
class _Account:
    """The usage of one key; `tokens_used` is None while the key has no token limit."""

    at_ms: int = 0
    requests_used: int = 0
    tokens_used: int | None = None
    leases: dict[str, float] = field(default_factory=dict)
    reserved: dict[str, int] = field(default_factory=dict)
    spent: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))


class MemoryQuotas:
    """The usage of all keys, by the clock's time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._accounts: defaultdict[str, _Account] = defaultdict(_Account)

    def admit(self, key: ApiKey, lease_id: str, *, ttl_s: float, now: float) -> RateLimitDecision:
        account, moment_s = self._accounts[key.id], self._clock.monotonic_s()
        account.at_ms = min(account.at_ms, int(moment_s * 1000))  # else: the clock was ahead
        elapsed_ms = int(moment_s * 1000) - account.at_ms
        requests = drained(account.requests_used, key.requests_per_minute or 0, elapsed_ms)
        tokens = drained(account.tokens_used or 0, key.tokens_per_minute or 0, elapsed_ms)
        latest_s = moment_s + max(ttl_s, MAX_CONCURRENCY_LEASE_S)
        account.leases = {
            id_: min(until, latest_s) for id_, until in account.leases.items() if until > moment_s
        }
        spent = account.spent[spend_field(key.spend_period, now)]
        outcome = RateLimitOutcome.ADMITTED
        if lease_id not in account.leases:
            outcome = judge(
                key,
                requests_used=requests,
                tokens_used=tokens,
                concurrent=len(account.leases),
                spent_nanos=spent,
            )
            if outcome is RateLimitOutcome.ADMITTED:
                account.leases[lease_id] = moment_s + ttl_s
                requests += UNITS if key.requests_per_minute is not None else 0
                account.at_ms, account.requests_used = int(moment_s * 1000), requests
                account.tokens_used = None if key.tokens_per_minute is None else tokens
        return RateLimitDecision(
            outcome=outcome,
            requests_used=requests,
            tokens_used=tokens,
            concurrent=len(account.leases),
            spent_nanos=spent,
        )

    def reserve(self, key: ApiKey, lease_id: str, nanos: int, *, now: float) -> bool:
        if key.spend_limit_nanos is None:
            return True
        account, moment_s = self._accounts[key.id], self._clock.monotonic_s()
        account.reserved = {
            id_: amount for id_, amount in account.reserved.items() if account.leases.get(id_, 0.0) > moment_s
        }
        others = sum(amount for id_, amount in account.reserved.items() if id_ != lease_id)
        if account.spent[spend_field(key.spend_period, now)] + others >= key.spend_limit_nanos:
            return False
        account.reserved[lease_id] = nanos
        return True

    def renew(self, leases: Sequence[ConcurrencyLease], *, ttl_s: float) -> None:
        for lease in leases:
            self._accounts[lease.key_id].leases[lease.id] = self._clock.monotonic_s() + ttl_s

    def release(self, leases: Sequence[ConcurrencyLease]) -> None:
        for lease in leases:
            self._accounts[lease.key_id].leases.pop(lease.id, None)

    def spent_nanos(self, key_id: str, period: SpendPeriod, now: float) -> int:
        return self._accounts[key_id].spent[spend_field(period, now)]

    def charge(self, record: RequestRecord) -> None:
        """Count the tokens and the cost of an ended request."""
        account = self._accounts[record.key_id]
        if account.tokens_used is not None:
            account.tokens_used += UNITS * (record.prompt_tokens + record.completion_tokens)
        for period in SpendPeriod:
            account.spent[spend_field(period, record.ended_at)] += record.cost_nanos

    def refund(self, record: RequestRecord) -> None:
        """Subtract the cost of a request, but not its tokens."""
        for period in SpendPeriod:
            self._accounts[record.key_id].spent[spend_field(period, record.ended_at)] -= record.cost_nanos

    def clear_tokens(self, key_id: str) -> None:
        """Stop counting tokens of a key that has no token limit any more."""
        self._accounts[key_id].tokens_used = None
