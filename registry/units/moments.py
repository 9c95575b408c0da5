"""Moments in human-readable form: `24h` (ago), `2026-11-21T08:00:00Z`, or Unix seconds."""

import re
from datetime import UTC, datetime

from registry.errors import InvalidRecord
from registry.units.durations import parse_duration

_LATEST_S = 1e12


def parse_moment(text: str, now_s: float) -> float:
    """Return Unix seconds. A time without a zone is UTC. Raises InvalidRecord."""
    compact = text.strip()
    if re.fullmatch(r"\d+(\.\d+)?[a-zA-Z][0-9a-zA-Z.]*", compact):
        return now_s - parse_duration(compact)
    return parse_time(compact)


def parse_time(text: str) -> float:
    """Return Unix seconds from Unix seconds or ISO 8601. Raises InvalidRecord."""
    try:
        at = float(text)
    except ValueError:
        at = _from_iso(text)
    if not 0 <= at < _LATEST_S:
        raise InvalidRecord(f"bad time {text!r}: it is out of range")
    return at


def _from_iso(text: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidRecord(
            f"bad time {text!r}: use a duration ago (24h), a UTC time (2026-11-21T08:00:00Z) or Unix seconds"
        ) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
