"""Rate limits, concurrency limits and spend limits of API keys. Pure.

A rate limit is a leaky bucket: a request (or token) adds UNITS to it, and at a limit of N per minute N units
leak out each millisecond, so that all numbers are integers. It holds one minute's worth.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from functools import lru_cache

from registry.errors import InvalidRecord
from registry.records.api_key import ApiKey, SpendPeriod

UNITS = 60_000
NANOS = 10**9
MAX_NANOS = 2**53
MAX_CONCURRENCY_LEASE_S = 60  # a lease that expires later was acquired when the clock was ahead
_BUSY_RETRY_S = 1.0
DAY_S = 86_400


class RateLimitOutcome(StrEnum):
    """The outcome of admission, and the limit that refused the request."""

    ADMITTED = "admitted"
    SPENT = "spent"  # the spend limit of the period is reached
    BUSY = "busy"  # the concurrency limit is reached
    REQUESTS = "requests"  # the limit of requests per minute is reached
    TOKENS = "tokens"  # the limit of tokens per minute is reached


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcurrencyLease:
    """A lease of one request in progress, which counts towards the concurrency limit of the key."""

    key_id: str
    id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimitDecision:
    """The outcome of admission and the usage of the key, with the request if it was admitted.

    `requests_used` and `tokens_used` are units of the buckets; `tokens_used` may be over the limit, since
    a request's tokens are known when it has ended. `concurrent` counts requests in progress.
    """

    outcome: RateLimitOutcome
    requests_used: int
    tokens_used: int
    concurrent: int
    spent_nanos: int


@dataclass(frozen=True, slots=True)
class SpendLimit:
    """A limit on the cost of the requests of a period."""

    nanos: int
    period: SpendPeriod

    def __str__(self) -> str:
        return f"{money(self.nanos)}/{self.period.value}"


def money(nanos: int) -> str:
    """Format an amount in the price table's currency, without rounding."""
    text = f"{Decimal(nanos) / NANOS:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def drained(used: int, limit: int, elapsed_ms: int) -> int:
    """Return the used units that are left after `elapsed_ms`."""
    return max(0, used - limit * elapsed_ms)


def judge(
    key: ApiKey, *, requests_used: int, tokens_used: int, concurrent: int, spent_nanos: int
) -> RateLimitOutcome:
    """Decide whether one more request may start."""
    if key.spend_limit_nanos is not None and spent_nanos >= key.spend_limit_nanos:
        return RateLimitOutcome.SPENT
    if key.max_concurrent is not None and concurrent >= key.max_concurrent:
        return RateLimitOutcome.BUSY
    if key.requests_per_minute is not None and requests_used + UNITS > key.requests_per_minute * UNITS:
        return RateLimitOutcome.REQUESTS
    if key.tokens_per_minute is not None and tokens_used >= key.tokens_per_minute * UNITS:
        return RateLimitOutcome.TOKENS
    return RateLimitOutcome.ADMITTED


def remaining(limit: int, used: int) -> int:
    """Return the number of requests or tokens that the bucket still takes."""
    return max(0, limit * UNITS - used) // UNITS


def full_in_ms(limit: int, used: int) -> int:
    """Return when the bucket is empty."""
    return -(-used // limit)


def retry_in_s(key: ApiKey, decision: RateLimitDecision, now: float) -> float:
    """Return when the refused request would be admitted if the key sent no other."""
    match decision.outcome:
        case RateLimitOutcome.SPENT:
            return period_end(key.spend_period, now) - now
        case RateLimitOutcome.BUSY:
            return _BUSY_RETRY_S
        case RateLimitOutcome.REQUESTS:
            limit = key.requests_per_minute or 1
            return -(-(decision.requests_used + UNITS - limit * UNITS) // limit) / 1000
        case RateLimitOutcome.TOKENS:
            limit = key.tokens_per_minute or 1
            return ((decision.tokens_used - limit * UNITS) // limit + 1) / 1000
        case _:
            return 0.0


def spend_field(period: SpendPeriod, at: float) -> str:
    """Return the name of the period that contains `at`: `2026-11-21`, `2026-11` or `total`."""
    return _spend_field(period, int(at // DAY_S))


@lru_cache(64)
def _spend_field(period: SpendPeriod, day: int) -> str:
    if period is SpendPeriod.TOTAL:
        return "total"
    date = datetime.fromtimestamp(day * DAY_S, UTC)
    return f"{date:%Y-%m-%d}" if period is SpendPeriod.DAY else f"{date:%Y-%m}"


def period_end(period: SpendPeriod, at: float) -> float:
    """Return the end of the period that contains `at` (Unix seconds)."""
    if period is SpendPeriod.TOTAL:
        return float("inf")
    day = _day(at)
    following = day + timedelta(days=1)
    if period is SpendPeriod.MONTH:
        following = (day.replace(day=1) + timedelta(days=32)).replace(day=1)
    return following.timestamp()


def parse_spend_limit(text: str) -> SpendLimit:
    """Parse `12.50/month`, in the price table's currency. Raises InvalidRecord."""
    amount, _, period = text.strip().partition("/")
    try:
        nanos = Decimal(amount) * NANOS
        if not 0 <= nanos <= MAX_NANOS or nanos != int(nanos):
            raise InvalidRecord(f"{amount!r} is not an amount from 0 to {MAX_NANOS // NANOS}")
        return SpendLimit(int(nanos), SpendPeriod(period))
    except (InvalidOperation, ValueError, OverflowError) as error:
        if isinstance(error, InvalidRecord):
            raise
        raise InvalidRecord(f"{text!r} is not a spend limit: use 5/day, 12.50/month or 100/total") from error


def _day(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
