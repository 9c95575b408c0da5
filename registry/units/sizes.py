"""Sizes and rates in human-readable form: `256MiB`, `4GB`; `200mbit`, `100MB/s`."""

import re
from decimal import Decimal

from registry.errors import InvalidRecord

_SIZES = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}
_BITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z/]*)")


def parse_size(text: str) -> int:
    """Return bytes; a bare number is bytes. Raises InvalidRecord with the reason."""
    number, unit = _split("size", text, "256MiB, 4GB or 1024")
    factor = _SIZES.get(unit or "b")
    if factor is None:
        known = "B, KB, MB, GB, TB, KiB, MiB, GiB, TiB"
        raise InvalidRecord(f"bad size {text!r}: unknown unit {unit!r} (use {known})")
    return _whole("size", text, number * factor)


def parse_rate(text: str) -> int:
    """Return bytes a second, from bits (`200mbit`) or bytes (`100MB/s`). Raises InvalidRecord."""
    number, unit = _split("rate", text, "200mbit, 1gbit or 100MB/s")
    if unit in _BITS:
        rate = _whole("rate", text, number * _BITS[unit] / 8)
    elif unit.endswith("/s") and unit[:-2] in _SIZES:
        rate = _whole("rate", text, number * _SIZES[unit[:-2]])
    else:
        known = "bit, kbit, mbit, gbit or a size a second as in MB/s"
        raise InvalidRecord(f"bad rate {text!r}: unknown unit {unit!r} (use {known})")
    if rate < 1:
        raise InvalidRecord(f"bad rate {text!r}: it must be at least 1 byte a second")
    return rate


def _split(noun: str, text: str, examples: str) -> tuple[Decimal, str]:
    found = _NUMBER.fullmatch(text.strip())
    if found is None:
        raise InvalidRecord(f"bad {noun} {text!r}: use a number and a unit, as in {examples}")
    return Decimal(found[1]), found[2].lower()


def _whole(noun: str, text: str, value: Decimal) -> int:
    if value != int(value) and value < 1:
        raise InvalidRecord(f"bad {noun} {text!r}: less than one byte")
    return int(value)
