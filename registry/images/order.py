"""The order of a decoder's tensors in its image, from their names alone.

A layer's tensors are those with its index in their name: `model.layers.3.mlp.down_proj.weight`. Within a
layer, matrices which engines fuse follow each other, weights before biases: q, k and v, gate and up, the
latter expert by expert. So each fused matrix is one view of the image.
"""

import re
from collections import defaultdict
from collections.abc import Collection

from registry.errors import CheckpointError
from registry.images.layer_tensors import MAX_LAYERS, LayerTensors, embed, head, layer

_INDEXED = re.compile(r"(?P<stack>(?:[^.\d][^.]*\.)+)(?P<index>\d+)\.")
_FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),  # gate and up in Mixtral
)
_RANKS = {name: (group[0], rank) for group in _FUSED for rank, name in enumerate(group)}
_KINDS = {"weight": 0, "bias": 1}
_HEADS = re.compile(r"(^|\.)(lm_head|embed_out)\.")
# What runs before the layers; the rest around them runs behind.
_IN_FRONT = re.compile(r"(^|[._])(emb\w*|wte|wpe|project_in)(\.|$)")
_OTHER_STACKS = re.compile(r"vision|visual|audio|encoder|speech")

HEAD_NAMES = ("lm_head.weight", "embed_out.weight")


def decoder_parts(architecture: str, names: Collection[str]) -> tuple[LayerTensors, ...]:
    """Return the tensors of a decoder, step by step. Raises CheckpointError where a layer has none."""
    stacks: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in names:
        if found := _INDEXED.match(name):
            stacks[found["stack"]][int(found["index"])].append(name)
    if not stacks:
        raise CheckpointError(f"{architecture}: no tensor has the index of a layer in its name (layers.0.…)")
    stack = max(stacks, key=lambda one: (not _OTHER_STACKS.search(one), len(stacks[one]), one))
    layers = stacks[stack]
    count = max(layers) + 1
    if count > MAX_LAYERS:
        raise CheckpointError(f"{architecture}: {layers[count - 1][0]!r} is of a layer beyond {MAX_LAYERS}")
    absent = next((index for index in range(count) if index not in layers), None)
    if absent is not None:
        raise CheckpointError(
            f"{architecture}: layer {absent} of {count} has no tensors, for example '{stack}{absent}.…'"
        )
    around = sorted(name for name in names if not name.startswith(stack) or not _INDEXED.match(name))
    in_front = [name for name in around if _runs_in_front(name)]
    behind = [name for name in around if not _runs_in_front(name)]
    behind.sort(key=lambda name: _HEADS.search(name) is not None)
    return (
        embed(*in_front),
        *(layer(index, sorted(layers[index], key=_place)) for index in range(count)),
        head(*behind),
    )


def _runs_in_front(name: str) -> bool:
    return _INDEXED.match(name) is not None or (
        _IN_FRONT.search(name) is not None and _HEADS.search(name) is None
    )


def _place(name: str) -> tuple[tuple[str, ...], int, str, tuple[int, ...], int]:
    """Return a tensor's sort key within its layer: module, kind, experts, rank in a fused group."""
    *modules, kind = name.split(".")
    rank, path, indices = 0, [], []
    for part in modules:
        if part.isdecimal():
            indices.append(int(part))
        else:
            first, own = _RANKS.get(part, (part, 0))
            path.append(first)
            rank = own or rank
    return tuple(path), _KINDS.get(kind, len(_KINDS)), kind, tuple(indices), rank
