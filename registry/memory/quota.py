"""Quotas in one process: what the quotas in Redis do, by the plainest means."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from registry.api_key import ApiKey, SpendPeriod
from registry.clock import Clock
from registry.quota import LONGEST_PLACE_S, UNITS, Place, Standing, Verdict, drained, judge, spend_field
from registry.usage import RequestRecord


@dataclass(slots=True)
class _Account:
    """One key's; `tokens_used` is None while the key has no limit of tokens."""

    at_ms: int = 0
    requests_used: int = 0
    tokens_used: int | None = None
    places: dict[str, float] = field(default_factory=dict)
    spent: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))


class MemoryQuotas:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._accounts: defaultdict[str, _Account] = defaultdict(_Account)

    def admit(self, key: ApiKey, place: str, *, ttl_s: float, now: float) -> Standing:
        account, moment_s = self._accounts[key.id], self._clock.monotonic_s()
        account.at_ms = min(account.at_ms, int(moment_s * 1000))  # else: the clock was ahead
        elapsed_ms = int(moment_s * 1000) - account.at_ms
        requests = drained(account.requests_used, key.requests_per_minute or 0, elapsed_ms)
        tokens = drained(account.tokens_used or 0, key.tokens_per_minute or 0, elapsed_ms)
        latest_s = moment_s + max(ttl_s, LONGEST_PLACE_S)
        account.places = {
            id_: min(until, latest_s) for id_, until in account.places.items() if until > moment_s
        }
        spent = account.spent[spend_field(key.spend_period, now)]
        verdict = Verdict.ADMITTED
        if place not in account.places:
            verdict = judge(
                key,
                requests_used=requests,
                tokens_used=tokens,
                places=len(account.places),
                spent_nanos=spent,
            )
            if verdict is Verdict.ADMITTED:
                account.places[place] = moment_s + ttl_s
                requests += UNITS if key.requests_per_minute is not None else 0
                account.at_ms, account.requests_used = int(moment_s * 1000), requests
                account.tokens_used = None if key.tokens_per_minute is None else tokens
        return Standing(
            verdict=verdict,
            requests_used=requests,
            tokens_used=tokens,
            places=len(account.places),
            spent_nanos=spent,
        )

    def keep(self, places: Sequence[Place], *, ttl_s: float) -> None:
        for place in places:
            self._accounts[place.key_id].places[place.id] = self._clock.monotonic_s() + ttl_s

    def release(self, places: Sequence[Place]) -> None:
        for place in places:
            self._accounts[place.key_id].places.pop(place.id, None)

    def spent_nanos(self, key_id: str, period: SpendPeriod, now: float) -> int:
        return self._accounts[key_id].spent[spend_field(period, now)]

    def charge(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        account = self._accounts[record.key_id]
        if account.tokens_used is not None:
            account.tokens_used += UNITS * (record.prompt_tokens + record.completion_tokens)
        for period in SpendPeriod:
            account.spent[spend_field(period, record.ended_at)] += record.cost_nanos

    def refund(self, record: RequestRecord) -> None:
        """Take back what a request cost, not its tokens."""
        for period in SpendPeriod:
            self._accounts[record.key_id].spent[spend_field(period, record.ended_at)] -= record.cost_nanos

    def forget_tokens(self, key_id: str) -> None:
        """The key has no limit of tokens any more: what comes now is no debt later."""
        self._accounts[key_id].tokens_used = None
