"""Quotas of API keys: what a key stands at, and what follows from it. Pure.

A rate is a leaky bucket: a request (or token) adds UNITS to what is used of it, and at a limit of N a
minute N units leak out each millisecond, so that all numbers are integers. It holds one minute's worth.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from functools import lru_cache

from registry.api_key import ApiKey, SpendPeriod
from registry.errors import InvalidRecord

UNITS = 60_000
NANOS = 10**9
MAX_NANOS = 2**53
LONGEST_PLACE_S = 60  # a place that lapses later was taken when the clock was ahead
_BUSY_RETRY_S = 1.0
_DAY_S = 86_400


class Verdict(StrEnum):
    ADMITTED = "admitted"
    SPENT = "spent"  # the period's money is used up
    BUSY = "busy"  # as many requests under way as the key may have
    REQUESTS = "requests"  # too many requests a minute
    TOKENS = "tokens"  # too many tokens a minute


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One request under way: `id` is unique, and holds one of the places of the key."""

    key_id: str
    id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What a key stands at when a request asked to be admitted (with it, if it was).

    `requests_used` and `tokens_used` are units of the buckets; `tokens_used` may be over the limit, since
    a request's tokens are known when it has ended. `places` are the requests under way.
    """

    verdict: Verdict
    requests_used: int
    tokens_used: int
    places: int
    spent_nanos: int


@dataclass(frozen=True, slots=True)
class SpendLimit:
    """What the requests of a period may cost."""

    nanos: int
    period: SpendPeriod

    def __str__(self) -> str:
        return f"{money(self.nanos)}/{self.period.value}"


def money(nanos: int) -> str:
    """An amount in the price table's currency, with no digit lost."""
    text = f"{Decimal(nanos) / NANOS:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def drained(used: int, limit: int, elapsed_ms: int) -> int:
    """What of `used` is left after some time."""
    return max(0, used - limit * elapsed_ms)


def judge(key: ApiKey, *, requests_used: int, tokens_used: int, places: int, spent_nanos: int) -> Verdict:
    """Whether one more request may begin."""
    if key.spend_limit_nanos is not None and spent_nanos >= key.spend_limit_nanos:
        return Verdict.SPENT
    if key.max_concurrent is not None and places >= key.max_concurrent:
        return Verdict.BUSY
    if key.requests_per_minute is not None and requests_used + UNITS > key.requests_per_minute * UNITS:
        return Verdict.REQUESTS
    if key.tokens_per_minute is not None and tokens_used >= key.tokens_per_minute * UNITS:
        return Verdict.TOKENS
    return Verdict.ADMITTED


def remaining(limit: int, used: int) -> int:
    """How many requests or tokens the bucket still takes."""
    return max(0, limit * UNITS - used) // UNITS


def full_in_ms(limit: int, used: int) -> int:
    """When nothing of the bucket is used any more."""
    return -(-used // limit)


def retry_in_s(key: ApiKey, standing: Standing, now: float) -> float:
    """When the refused request would be admitted, if nothing else of the key came."""
    match standing.verdict:
        case Verdict.SPENT:
            return period_end(key.spend_period, now) - now
        case Verdict.BUSY:
            return _BUSY_RETRY_S
        case Verdict.REQUESTS:
            limit = key.requests_per_minute or 1
            return -(-(standing.requests_used + UNITS - limit * UNITS) // limit) / 1000
        case Verdict.TOKENS:
            limit = key.tokens_per_minute or 1
            return ((standing.tokens_used - limit * UNITS) // limit + 1) / 1000
        case _:
            return 0.0


def spend_field(period: SpendPeriod, at: float) -> str:
    """The name of the period that holds the moment: `2026-11-21`, `2026-11` or `total`."""
    return _spend_field(period, int(at // _DAY_S))


@lru_cache(64)
def _spend_field(period: SpendPeriod, day: int) -> str:
    if period is SpendPeriod.TOTAL:
        return "total"
    date = datetime.fromtimestamp(day * _DAY_S, UTC)
    return f"{date:%Y-%m-%d}" if period is SpendPeriod.DAY else f"{date:%Y-%m}"


def period_end(period: SpendPeriod, at: float) -> float:
    """When the period that holds the moment is over (Unix seconds)."""
    if period is SpendPeriod.TOTAL:
        return float("inf")
    day = _day(at)
    following = day + timedelta(days=1)
    if period is SpendPeriod.MONTH:
        following = (day.replace(day=1) + timedelta(days=32)).replace(day=1)
    return following.timestamp()


def parse_spend_limit(text: str) -> SpendLimit:
    """`12.50/month`, in the price table's currency. Raises InvalidRecord."""
    amount, _, period = text.strip().partition("/")
    try:
        nanos = Decimal(amount) * NANOS
        if not 0 <= nanos <= MAX_NANOS or nanos != int(nanos):
            raise InvalidRecord(f"{amount!r} is no amount of money from 0 to {MAX_NANOS // NANOS}")
        return SpendLimit(int(nanos), SpendPeriod(period))
    except (InvalidOperation, ValueError, OverflowError) as error:
        if isinstance(error, InvalidRecord):
            raise
        raise InvalidRecord(f"{text!r} is no spend limit: write 5/day, 12.50/month or 100/total") from error


def _day(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
