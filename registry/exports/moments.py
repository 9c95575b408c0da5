"""Moments as text. Pure."""

from datetime import UTC, datetime, timedelta

from registry.records.quota import DAY_S


def rfc3339_ms(at: float) -> str:
    """Return Unix seconds in UTC, down to the millisecond."""
    second, millis = divmod(int(at * 1000), 1000)
    return f"{datetime.fromtimestamp(second, UTC):%Y-%m-%dT%H:%M:%S}.{millis:03}Z"


def unix_ms(at: float) -> str:
    """Return Unix seconds with three digits of a fraction, as `rfc3339_ms` does."""
    second, millis = divmod(int(at * 1000), 1000)
    return f"{second}.{millis:03}"


def start_of_day(day: int) -> str:
    """Return the start of a UTC day (since the epoch)."""
    return _second(datetime.fromtimestamp(day * DAY_S, UTC))


def month_of(day: int) -> tuple[str, str]:
    """Return the start and the (exclusive) end of the UTC month that a day is in."""
    first = datetime.fromtimestamp(day * DAY_S, UTC).replace(day=1)
    after = (first + timedelta(days=31)).replace(day=1)
    return _second(first), _second(after)


def _second(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")
