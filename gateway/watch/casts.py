"""Casts as watchers see them, and what has arrived on their nodes. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

import msgspec

from registry.messages.arrivals import Arrivals
from registry.records.cast import CastRecord, CastState
from registry.records.instance import InstanceState
from registry.records.node import NodeRecord

MAX_CASTS = 64  # that are shown, the latest
MAX_FOLLOWED = 256  # nodes that report what arrives on them
_LOADING = (InstanceState.STARTING, InstanceState.LOADING)


class ShownPart(msgspec.Struct, frozen=True, kw_only=True):
    """A node's part: `source`, `running`, or how it ended: `complete`, `failed`, `cancelled`, `lost`."""

    node: str
    tier: str
    state: str


class ShownCast(msgspec.Struct, frozen=True, kw_only=True):
    """A cast; it is `running` while a part is."""

    function: str
    version: int
    nbytes: int
    planner: str
    reason: str
    started_at: float
    running: bool
    parts: Sequence[ShownPart]


class ShownBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """What a node holds of an image that arrives: bit i (little-endian, base64) of `cells` equal parts.

    `at` is when it held that, in Unix seconds of its clock.
    """

    cast: str
    node: str
    cells: int
    held: bytes
    at: float


class ShownLayers(msgspec.Struct, frozen=True, kw_only=True):
    """Which of `layers` a loading instance has on its accelerator: bit i (little-endian, base64)."""

    layers: int
    held: bytes
    at: float


def show_cast(
    record: CastRecord, ended: Mapping[str, CastState], nodes: Mapping[str, NodeRecord]
) -> ShownCast:
    """Return the cast as it is shown; `nodes` are those that are up, `ended` the parts known to be over."""
    parts = []
    for index, member in enumerate(record.members):
        state = "source"
        if index not in record.sources:
            state = _state(record.image, ended.get(member.node), nodes.get(member.node))
        parts.append(ShownPart(node=member.node, tier=member.tier, state=state))
    return ShownCast(
        function=record.function,
        version=record.version,
        nbytes=record.nbytes,
        planner=record.planner,
        reason=record.reason,
        started_at=record.started_at,
        running=any(part.state == "running" for part in parts),
        parts=parts,
    )


def _state(image: str, ended: CastState | None, node: NodeRecord | None) -> str:
    if ended is not None:
        return ended.value
    if node is None:
        return "lost"
    # A gateway that has started since the part ended knows it only by what the node holds.
    return "complete" if any(one.image == image for one in node.holdings) else "running"


def nodes_to_follow(casts: Iterable[ShownCast], loading: Iterable[tuple[str, InstanceState]]) -> list[str]:
    """Return the nodes on which something arrives: targets of running casts, and (node, state) of starts."""
    found: dict[str, None] = {}
    for cast in casts:
        if cast.running:
            found.update((part.node, None) for part in cast.parts if part.state == "running")
    found.update((node, None) for node, state in loading if state in _LOADING)
    return list(islice(found, MAX_FOLLOWED))


def show_blocks(
    casts: Iterable[tuple[str, str, ShownCast]], arrivals: Mapping[str, Arrivals]
) -> Iterator[tuple[str, str, ShownBlocks]]:
    """Yield (id, function, blocks) of nodes on which the image of a running cast arrives.

    `casts` are (id, image, cast).
    """
    for cast_id, image, cast in casts:
        for part in cast.parts if cast.running else ():
            reported = arrivals.get(part.node)
            for one in reported.images if reported is not None and part.state == "running" else ():
                if one.image == image and reported is not None:
                    blocks = ShownBlocks(
                        cast=cast_id, node=part.node, cells=one.cells, held=one.held, at=reported.at
                    )
                    yield f"{cast_id} {part.node}", cast.function, blocks


def show_layers(
    functions: Mapping[str, str], arrivals: Iterable[Arrivals]
) -> Iterator[tuple[str, str, ShownLayers]]:
    """Yield (id, function, layers) of loading instances; `functions` has the function of each instance."""
    for reported in arrivals:
        for one in reported.instances:
            if (function := functions.get(one.instance_id)) is not None:
                shown = ShownLayers(layers=one.layers, held=one.held, at=reported.at)
                yield one.instance_id, function, shown
