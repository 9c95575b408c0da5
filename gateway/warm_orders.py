"""In which order nodes load a model from their own host memory, so that they can serve together early (pure).

Each begins with another part of the layers and goes around. Nodes that get the model by a cast begin with the
parts of its sub-groups: the warm ones then begin with what these bring last.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.model_layers import ModelLayers


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdGroups:
    """Sub-groups of a cast, which begin with `groups` equal parts; `rate` is how fast one of their nodes
    gets the model, in any unit that is also that of the warm nodes' rate."""

    groups: int
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmOrders:
    """`first_layers[i]` is where warm node i begins; it goes on to the last layer and then from layer 0 on.
    By the prediction a pipeline can be formed when `share` of the model has come to a warm node."""

    first_layers: tuple[int, ...]
    share: float
    reason: str

    def order(self, node: int, layers: int) -> tuple[int, ...]:
        first = self.first_layers[node]
        return (*range(first, layers), *range(first))


def warm_orders(
    layers: ModelLayers, warm: int, warm_rate: float = 1.0, cold: ColdGroups | None = None
) -> WarmOrders:
    """Divide the layers among `warm` nodes, with those of a cast where that brings a pipeline sooner."""
    if warm < 1 or warm_rate <= 0:
        raise ValueError(f"{warm} warm nodes at a rate of {warm_rate}")
    alone = [place / warm for place in range(warm)]
    chosen, share, reason = alone, 1 / warm, f"{warm} warm nodes divide the layers"
    if cold is not None and cold.groups > 0 and cold.rate > 0:
        mixed, mixed_share = _mixed(warm, warm_rate, cold)
        if mixed_share < share:
            chosen, share = mixed, mixed_share
            reason = f"{warm} warm nodes and {cold.groups} sub-groups divide the layers"
    return WarmOrders(
        first_layers=tuple(_layer_at(layers, part) for part in chosen), share=share, reason=reason
    )


def _mixed(warm: int, warm_rate: float, cold: ColdGroups) -> tuple[list[float], float]:
    """Where the warm ones begin if each part of a sub-group is shared with some of them, by rate; and how
    much of the model each must load until all layers are there."""
    starts, longest = list[float](), 0.0
    for group in range(cold.groups):
        helpers = warm // cold.groups + (group < warm % cold.groups)
        begin, width = group / cold.groups, 1 / cold.groups
        own = width * cold.rate / (cold.rate + helpers * warm_rate)
        each = own * warm_rate / cold.rate  # what a helper loads while the sub-group gets `own`
        starts += [begin + own + place * each for place in range(helpers)]
        longest = max(longest, each)
    return starts, longest


def _layer_at(layers: ModelLayers, part: float) -> int:
    """The layer before which about `part` of the model's cost lies."""
    until: Sequence[float] = layers.until
    after = bisect_left(until, part * until[-1])
    if after and part * until[-1] - until[after - 1] <= until[after] - part * until[-1]:
        after -= 1
    return min(after, len(layers) - 1)
