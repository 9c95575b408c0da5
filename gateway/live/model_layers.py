"""The blocks and the cost of each layer of a model (pure).

Pipelines divide a model by layers. The embedding belongs to the first layer, the final norm and the head to
the last; a tied head is the embedding, so the first stage runs it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from rdmacast.bitfield import to_bits
from registry.images.manifest import LayerSpan, Manifest
from registry.records.function import FunctionTask, FunctionVersion


class NotLayered(ValueError):
    """The model is not a single sequence of layers, so no pipeline can run it."""


@dataclass(frozen=True, kw_only=True)
class ModelLayers:
    """The layers of a model: `needs[i]` are the blocks of layer i as bits, `costs[i]` is its cost."""

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
        """`until[i]` is the cost of the layers `[0, i)`."""
        return tuple(accumulate(self.costs, initial=0.0))

    @cached_property
    def all_blocks(self) -> int:
        bits = 0
        for need in self.needs:
            bits |= need
        return bits

    def ends(self, held: int) -> tuple[int, ...]:
        """Return for each layer p the end of the run `[p, end)` that the blocks `held` can execute."""
        ends = [len(self)] * len(self)
        end = len(self)
        for layer in reversed(range(len(self))):
            if self.needs[layer] & ~held:
                end = layer
            ends[layer] = end
        return tuple(ends)


def is_layered(version: FunctionVersion) -> bool:
    """Return whether the nodes' own engine runs the version layer by layer: a generative model."""
    generates = version.task is FunctionTask.GENERATE and version.manifest is not None
    return generates and version.runs_natively


def even_layers(blocks: int) -> ModelLayers:
    """Return a model in which each block is a layer, and all cost the same."""
    return ModelLayers(needs=tuple(1 << block for block in range(blocks)), costs=(1.0,) * blocks)


def layers_of(manifest: Manifest, block_bytes: int, costs: Sequence[float] | None = None) -> ModelLayers:
    """Return the layers of an image with blocks of `block_bytes`. Raises NotLayered.

    By default the cost of a layer is its size, since decoding is bound by memory bandwidth.
    """
    spans = manifest.layers
    layers = sorted((span for span in spans if span.kind == "layer"), key=lambda span: span.index)
    if not layers or len({span.tower for span in spans}) != 1:
        raise NotLayered(f"{manifest.architecture} is not a single sequence of layers")
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
    return to_bits(range(span.start // block_bytes, -(-span.end // block_bytes)))
