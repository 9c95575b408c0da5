"""The layout of an image: a standard safetensors file with its tensors in the order of execution.

The format: eight bytes with the header's length, a JSON header, and the tensors without holes between them
(https://github.com/huggingface/safetensors#format). The header is padded with spaces.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from registry.images.dtype_names import target_dtype
from registry.images.layer_tensors import LayerTensors
from registry.images.manifest import UNIT_BYTES, LayerSpan, TensorEntry
from registry.images.safetensors_file import DTYPE_BYTES, SourceTensor

_LENGTH_BYTES = 8
_METADATA = {"format": "pt"}  # transformers loads no file without it


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Tensors in the order of execution, and the steps' spans, contiguous over `[0, nbytes)`.

    The header belongs to the first span.
    """

    tensors: tuple[TensorEntry, ...]
    layers: tuple[LayerSpan, ...]
    nbytes: int


def encode_header(tensors: Sequence[TensorEntry], multiple: int = UNIT_BYTES) -> bytes:
    """Return the start of an image with these tensors, of which only the differences of offsets count.

    It is padded to a multiple of `multiple` bytes.
    """
    begin = tensors[0].offset if tensors else 0
    header: dict[str, object] = {"__metadata__": _METADATA}
    for entry in tensors:
        start = entry.offset - begin
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "data_offsets": (start, start + entry.nbytes),
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    size = -(-(_LENGTH_BYTES + len(text)) // multiple) * multiple
    length = size - _LENGTH_BYTES
    return length.to_bytes(_LENGTH_BYTES, "little") + text.ljust(length)


def lay_out(
    parts: tuple[LayerTensors, ...], sources: Mapping[str, SourceTensor], dtype: str = "auto"
) -> Layout:
    """Place the header, and behind it the tensors of `parts` one after the other.

    The first tensor starts at a unit's border. Nearly all tensors have a multiple of 256 bytes, so that the
    others are aligned too.
    """
    tensors: list[TensorEntry] = []
    edges = [0]
    position = 0
    for part in parts:
        for name in part.names:
            source = sources[name]
            stored = target_dtype(source.dtype, dtype)
            nbytes = prod(source.shape) * DTYPE_BYTES[stored]
            tensors.append(
                TensorEntry(name=name, dtype=stored, shape=source.shape, offset=position, nbytes=nbytes)
            )
            position += nbytes
        edges.append(position)
    begin = len(encode_header(tensors))
    starts = (0, *(begin + edge for edge in edges[1:-1]))
    layers = tuple(
        LayerSpan(kind=part.kind, index=part.index, tower=part.tower, start=start, end=begin + end)
        for part, start, end in zip(parts, starts, edges[1:], strict=False)
    )
    return Layout(
        tensors=tuple(replace(entry, offset=begin + entry.offset) for entry in tensors),
        layers=layers,
        nbytes=begin + position,
    )
