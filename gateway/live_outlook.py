"""What is predicted of a function's starts, for the decision whether to serve while they load (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from gateway.actions import StartOn
from gateway.live_policy import Outlook
from rdmacast.plan import CastShape
from rdmacast.planners.subgroups import subgroups
from registry.cast import CastRecord
from registry.node import NodeRecord

_LINK_BYTES_PER_S = 1.25e9  # of links of which nothing was told: 10 Gbit/s
# From host memory to where the node computes, where nothing better is known.
_HOST_BYTES_PER_S = 4e9
_OWN = -1  # and below: of nodes that get the image in no sub-group's order


@dataclass(frozen=True, slots=True, kw_only=True)
class Arriving:
    """A start that is made: `group` names the block order in which the image comes."""

    start: StartOn
    group: int


def arriving(starts: Sequence[StartOn]) -> tuple[Arriving, ...]:
    return tuple(
        Arriving(start=start, group=_group(start.cast, start.node, _OWN - place))
        for place, start in enumerate(starts)
    )


def outlook(
    starts: Sequence[StartOn], nodes: dict[str, NodeRecord], *, loading: int, ready: int, held: int
) -> Outlook:
    """`loading` instances load already, `ready` ones serve, and `held` calls wait for a slot.

    A pipeline is there when each of k sub-groups has its kth of the image. What begins at the same block
    everywhere holds all of it nowhere before the first node does.
    """
    wait_s = min((_load_s(start, nodes) for start in starts), default=inf)
    groups = {one.group for one in arriving(starts) if one.start.cast is not None}
    together = len(starts) + loading
    pipeline_s = wait_s / max(1, len(groups)) if together > 1 else inf
    queue_s = inf if not ready or held else 0.0
    return Outlook(wait_s=wait_s, pipeline_s=pipeline_s, queue_s=queue_s)


def _load_s(start: StartOn, nodes: dict[str, NodeRecord]) -> float:
    nbytes = start.version.image_bytes
    copy_s = nbytes / _HOST_BYTES_PER_S
    node = nodes.get(start.node)
    if start.cast is None and (not start.holders or node is None or _is_here(start, node)):
        return copy_s
    rate = None if node is None else node.link_rate_bytes_s
    return max(copy_s, nbytes / (rate or _LINK_BYTES_PER_S))


def _is_here(start: StartOn, node: NodeRecord) -> bool:
    return any(holder.host == node.host for holder in start.holders)


def _group(cast: CastRecord | None, node: str, own: int) -> int:
    """Of the cast's sub-group, which begins with a chunk of its own; `own` where the node is in none."""
    if cast is None:
        return own
    names = [member.node for member in cast.members[: cast.planned]]
    shape = CastShape(nodes=cast.planned, sources=cast.sources, blocks=1)
    for number, group in enumerate(subgroups(shape)):
        if node in {names[member] for member in group}:
            return number
    return own
