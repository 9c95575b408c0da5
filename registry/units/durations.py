"""Durations in human-readable form: `90s`, `5m`, `1h`, `250ms`, `1h30m`."""

import re

from registry.errors import InvalidRecord

_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)([a-z]+)")


def parse_duration(text: str) -> float:
    """Return a duration in seconds. Raises InvalidRecord with the reason."""
    compact = text.strip().lower()
    if compact == "0":
        return 0.0
    if re.fullmatch(r"\d+(\.\d+)?", compact):
        raise InvalidRecord(f"bad duration {text!r}: it has no unit (write {compact}s for seconds)")
    total, position, last = 0.0, 0, float("inf")
    for part in _PART.finditer(compact):
        if part.start() != position:
            break
        unit_s = _UNITS_S.get(part[2])
        if unit_s is None:
            raise InvalidRecord(f"bad duration {text!r}: unknown unit {part[2]!r} (use us, ms, s, m, h, d)")
        if unit_s >= last:
            raise InvalidRecord(f"bad duration {text!r}: larger units come first, each once")
        total += float(part[1]) * unit_s
        position, last = part.end(), unit_s
    if position == 0 or position != len(compact):
        raise InvalidRecord(f"bad duration {text!r}: use numbers with units, as in 90s, 5m, 1h, 250ms")
    return total
