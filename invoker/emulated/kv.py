"""Keys and values of an emulated model: they take their bytes, and record which tokens they belong to."""

from collections.abc import Sequence

import torch

from invoker.emulated.profiles import Profile
from invoker.engine.kv.cache import KvShape
from invoker.engine.kv.slices import KvSlice
from invoker.engine.scheduling.sequence_table import InvalidSequence

_ITEM = torch.int32


def kv_shape(profile: Profile, layers: int) -> KvShape:
    """Return the shape of a token in `layers` layers, at the profile's scale: one head of the total width."""
    width = -(-profile.kv_layer_bytes // (2 * _ITEM.itemsize))
    return KvShape(layers=layers, heads=1, head_dim=max(1, width), dtype=_ITEM)


def slice_of(shape: KvShape, first: int, last: int, tokens: Sequence[int]) -> KvSlice:
    """Return the slice of the layers `[first, last)` for a sequence's first tokens."""
    data = torch.zeros((last - first, 2, len(tokens), shape.head_dim), dtype=_ITEM)
    data[..., 0] = torch.tensor(tokens, dtype=_ITEM)
    return KvSlice(first=first, last=last, data=data)


def check_tokens(slices: Sequence[KvSlice], tokens: Sequence[int]) -> None:
    """Raise InvalidSequence if the slices belong to other tokens."""
    known = torch.tensor(tokens, dtype=_ITEM)
    for one in slices:
        count = min(one.tokens, len(tokens))
        if not bool((one.data[:, :, :count, 0] == known[:count]).all()):
            raise InvalidSequence("the keys and values belong to other tokens")
