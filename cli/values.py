"""Values as people read them: sizes, times, durations, money."""

import time
from datetime import UTC, datetime

from registry.records.quota import NANOS as NANOS

_SYMBOLS = {"USD": "$", "EUR": "€", "GBP": "£", "JPY": "¥"}


def human_bytes(count: float) -> str:
    """Return a size with a binary unit, as `15.1 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def exact_amount(nanos: int) -> str:
    """Return an exact amount without needless zeros, as `0.0000238`."""
    whole, rest = divmod(abs(nanos), NANOS)
    digits = f"{rest:09}".rstrip("0").ljust(2, "0")
    return f"{'-' if nanos < 0 else ''}{whole}.{digits}"


def money(nanos: int, currency: str = "USD") -> str:
    """Return an amount with its currency, as `$0.000118` or `CHF 1.20`."""
    symbol = _SYMBOLS.get(currency, f"{currency} ")
    return f"{'-' if nanos < 0 else ''}{symbol}{exact_amount(abs(nanos))}"


def duration(seconds: float) -> str:
    """Return a duration in the form that options accept, as `90s`, `5m` or `250ms`."""
    if 0 < seconds < 1:
        return f"{seconds * 1000:g}ms"
    for unit, length in (("h", 3600), ("m", 60)):
        if seconds >= length and seconds % length == 0:
            return f"{seconds / length:g}{unit}"
    return f"{seconds:g}s"


def age(seconds: float) -> str:
    """Return how long ago something was, in its greatest unit, as kubectl does: `45s`, `12m`, `3h`, `9d`."""
    seconds = max(0.0, seconds)
    for unit, length in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:.0f}s"


def age_of(at: float) -> str:
    """Return how long ago a moment in Unix seconds was."""
    return age(time.time() - at)


def utc(at: float) -> str:
    """Return Unix seconds as ISO 8601 in UTC, to the second."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def utc_ms(at: float) -> str:
    """Return Unix seconds as ISO 8601 in UTC, to the millisecond."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def source_at(source: str, revision: str) -> str:
    """Return where a model is from, with its commit if that is known."""
    return f"{source}@{revision}" if source and revision else source
