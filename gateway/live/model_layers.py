"""What each layer of a model needs of its image, and what it costs to run (pure).

Pipelines divide a model by layers. The embedding goes with the first layer, and the final norm and the head
with the last; a tied head is the embedding, so it is run by whoever has the first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from rdmacast.have_map import bits_of
from registry.images.manifest import LayerSpan, Manifest


class NotLayered(ValueError):
    """The model is no single row of layers, so no pipeline can run it."""


@dataclass(frozen=True, kw_only=True)
class ModelLayers:
    """`needs[i]` are the blocks of layer i as bits, `costs[i]` its part of a step's time, in any unit."""

    needs: tuple[int, ...]
    costs: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.needs or len(self.needs) != len(self.costs):
            raise ValueError(f"{len(self.needs)} layers and {len(self.costs)} costs")
        if min(self.costs) <= 0:
            raise ValueError("each layer must cost something")

    def __len__(self) -> int:
        return len(self.needs)

    @cached_property
    def until(self) -> tuple[float, ...]:
        """`until[i]` is what the layers `[0, i)` cost."""
        return tuple(accumulate(self.costs, initial=0.0))

    @cached_property
    def all_blocks(self) -> int:
        bits = 0
        for need in self.needs:
            bits |= need
        return bits

    def ends(self, held: int) -> tuple[int, ...]:
        """For each layer p the end of the run `[p, end)` of layers that can run on `held` blocks."""
        ends = [len(self)] * len(self)
        end = len(self)
        for layer in reversed(range(len(self))):
            if self.needs[layer] & ~held:
                end = layer
            ends[layer] = end
        return tuple(ends)


def even_layers(blocks: int) -> ModelLayers:
    """A model of which nothing is known: each block is a layer, and all cost the same."""
    return ModelLayers(needs=tuple(1 << block for block in range(blocks)), costs=(1.0,) * blocks)


def layers_of(manifest: Manifest, block_bytes: int, costs: Sequence[float] | None = None) -> ModelLayers:
    """The layers of an image that comes in blocks of `block_bytes`; by default a layer costs its bytes, since
    decoding reads them all. Raises NotLayered."""
    spans = manifest.layers
    layers = sorted((span for span in spans if span.kind == "layer"), key=lambda span: span.index)
    if not layers or len({span.tower for span in spans}) != 1:
        raise NotLayered(f"{manifest.architecture} is no single row of layers")
    needs = [_blocks(span, block_bytes) for span in layers]
    found = [float(max(1, span.end - span.start)) for span in layers]
    embed_bytes = sum(span.end - span.start for span in spans if span.kind == "embed")
    for span in spans:
        if span.kind == "embed":
            needs[0] |= _blocks(span, block_bytes)
        elif span.kind == "head":
            needs[-1] |= _blocks(span, block_bytes)
            found[-1] += span.end - span.start
    if manifest.tied_head:
        found[0] += embed_bytes
    return ModelLayers(needs=tuple(needs), costs=tuple(found if costs is None else costs))


def _blocks(span: LayerSpan, block_bytes: int) -> int:
    if span.start >= span.end:
        return 0
    return bits_of(range(span.start // block_bytes, -(-span.end // block_bytes)))
