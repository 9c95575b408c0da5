"""Percentiles of what was measured."""

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float | None:
    """Nearest rank; None of nothing."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(len(values) * share / 100) - 1)]
