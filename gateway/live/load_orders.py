"""Where in a model each node begins that loads it from its own host's memory, so that all can serve together
early (pure).

A load goes on to the last layer and then from the first on. All layers are somewhere once the widest part
between two beginnings has been loaded: so each begins in the widest part that is left, also beside loads
that have begun before and beside the sub-groups of a cast, which begin with chunks of their own. How fast
each load is need not be known; all are taken to be alike.
"""

from bisect import bisect_left
from collections.abc import Collection, Sequence

from gateway.model_layers import ModelLayers


def warm_places(warm: int, others: Collection[float] = (), *, casts: int = 1) -> tuple[float, ...]:
    """Where `warm` loads begin, as parts of the model's cost in [0, 1); `others` is where other loads do.

    One that is the first of all leaves room for a cast of `casts` sub-groups that may follow.
    """
    if warm < 0 or casts < 1 or not all(0 <= other < 1 for other in others):
        raise ValueError(f"{warm} loads beside {others} and {casts} sub-groups")
    known = sorted(set(others))
    if not known:
        parts = casts if warm == 1 else warm
        return tuple((place + 0.5) / parts for place in range(warm))
    widths = [(after - before) % 1 or 1.0 for before, after in zip(known, known[1:] + known[:1], strict=True)]
    inside = [0] * len(known)
    for _ in range(warm):
        shares = [width / (count + 1) for width, count in zip(widths, inside, strict=True)]
        inside[shares.index(max(shares))] += 1
    return tuple(
        (before + width * place / (count + 1)) % 1
        for before, width, count in zip(known, widths, inside, strict=True)
        for place in range(1, count + 1)
    )


def layer_at(layers: ModelLayers, part: float) -> int:
    """The layer before which about `part` of the model's cost lies."""
    until: Sequence[float] = layers.until
    after = bisect_left(until, part * until[-1])
    if after and part * until[-1] - until[after - 1] <= until[after] - part * until[-1]:
        after -= 1
    return min(after, len(layers) - 1)
