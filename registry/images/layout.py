"""The offsets of tensors in an image: pure arithmetic."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from registry.images.dtype_names import target_dtype
from registry.images.layer_tensors import LayerTensors
from registry.images.manifest import ALIGNMENT, LayerSpan, TensorEntry
from registry.images.safetensors_file import DTYPE_BYTES, SourceTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Tensors in the order of execution, and the steps' spans, contiguous over `[0, nbytes)`."""

    tensors: tuple[TensorEntry, ...]
    layers: tuple[LayerSpan, ...]
    nbytes: int


def align(offset: int) -> int:
    """Return the first aligned offset at or behind `offset`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def lay_out(
    parts: tuple[LayerTensors, ...], sources: Mapping[str, SourceTensor], dtype: str = "auto"
) -> Layout:
    """Place the tensors of `parts` one after the other, each aligned.

    The padding behind a step's last tensor belongs to that step, so every span is aligned too.
    """
    tensors: list[TensorEntry] = []
    layers: list[LayerSpan] = []
    position = 0
    for part in parts:
        start = position
        for name in part.names:
            source = sources[name]
            stored = target_dtype(source.dtype, dtype)
            nbytes = prod(source.shape) * DTYPE_BYTES[stored]
            tensors.append(
                TensorEntry(name=name, dtype=stored, shape=source.shape, offset=position, nbytes=nbytes)
            )
            position = align(position + nbytes)
        layers.append(
            LayerSpan(kind=part.kind, index=part.index, tower=part.tower, start=start, end=position)
        )
    return Layout(tensors=tuple(tensors), layers=tuple(layers), nbytes=position)
