"""The runs of layers into which entries cut a step (pure)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from invoker.engine.kv.entry import LayerEntry
from invoker.engine.scheduling.scheduler import Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSegment:
    """The layers `[first, last)` of a step, with the chunks that run through them."""

    first: int
    last: int
    chunks: tuple[Chunk, ...]


def layer_segments(
    chunks: Sequence[Chunk], entries: Mapping[str, LayerEntry], layers: int
) -> list[LayerSegment]:
    """Cut a step of a model of `layers` layers where chunks enter; others run through all layers."""
    firsts = [entries[chunk.request_id].layers if chunk.request_id in entries else 0 for chunk in chunks]
    return [
        LayerSegment(
            first=first,
            last=last,
            chunks=tuple(chunk for chunk, own in zip(chunks, firsts, strict=True) if own <= first),
        )
        for first, last in pairwise([*sorted(set(firsts)), layers])
    ]
