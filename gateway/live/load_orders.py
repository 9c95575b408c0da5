"""Load orders: the layer at which each load from host memory starts, for an early pipeline (pure).

A load wraps around at the last layer. The loads hold all layers between them once the widest gap between two
starting points is loaded, so each new load starts in the widest gap left by earlier loads and by the
sub-groups of a cast, which start with chunks of their own. All loads are assumed to be equally fast.
"""

from bisect import bisect_left
from collections.abc import Collection, Sequence

from gateway.live.model_layers import ModelLayers


def warm_places(warm: int, others: Collection[float] = (), *, casts: int = 1) -> tuple[float, ...]:
    """Return the starting points of `warm` loads as fractions of the model's cost, in [0, 1).

    `others` are the starting points of other loads. The first load of all leaves room for a later cast of
    `casts` sub-groups. Raises ValueError.
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
    """Return the layer before which about the fraction `part` of the model's cost lies."""
    until: Sequence[float] = layers.until
    after = bisect_left(until, part * until[-1])
    if after and part * until[-1] - until[after - 1] <= until[after] - part * until[-1]:
        after -= 1
    return min(after, len(layers) - 1)
