"""Keys and values of a model that is not there: none are kept, but they take their room, and move as bytes
that say which tokens they are of."""

from collections.abc import Sequence

import torch

from invoker.emulated.profiles import Profile
from invoker.engine.kv_cache import KvShape
from invoker.engine.kv_slices import KvSlice
from invoker.engine.sequences import BadSequence

_ITEM = torch.int32


def kv_shape(profile: Profile, layers: int) -> KvShape:
    """What a token takes in so many layers, at the profile's scale: one head, as wide as all are."""
    width = -(-profile.kv_layer_bytes // (2 * _ITEM.itemsize))
    return KvShape(layers=layers, heads=1, head_dim=max(1, width), dtype=_ITEM)


def slice_of(shape: KvShape, first: int, last: int, tokens: Sequence[int]) -> KvSlice:
    """The slice of these layers for a sequence's first tokens."""
    data = torch.zeros((last - first, 2, len(tokens), shape.head_dim), dtype=_ITEM)
    data[..., 0] = torch.tensor(tokens, dtype=_ITEM)
    return KvSlice(first=first, last=last, data=data)


def check_tokens(slices: Sequence[KvSlice], tokens: Sequence[int]) -> None:
    """Raise BadSequence if the slices are of other tokens."""
    known = torch.tensor(tokens, dtype=_ITEM)
    for one in slices:
        count = min(one.tokens, len(tokens))
        if not bool((one.data[:, :, :count, 0] == known[:count]).all()):
            raise BadSequence("the keys and values are of other tokens")
