"""Percentiles and quantiles of measurements."""

import math
from collections.abc import Iterable, Sequence


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the nearest-rank percentile, or None without values."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(len(values) * share / 100) - 1)]


def quantiles(values: Iterable[float], count: int = 200) -> list[float]:
    """Return evenly spaced quantiles, the least and the greatest among them."""
    ordered = sorted(values)
    if not ordered:
        return []
    last = len(ordered) - 1
    return [round(ordered[round(last * step / count)], 6) for step in range(count + 1)]
