"""K, V and hidden states of an emulated model: they take their bytes, and record what they belong to."""

from collections.abc import Sequence

import torch

from invoker.emulated.profiles import Profile
from invoker.engine.kv.cache import KvShape
from invoker.engine.kv.slices import KvSlice
from invoker.engine.scheduling.sequence_table import InvalidSequence

_ITEM = torch.int32
ROWS = torch.int32  # of hidden states


def kv_shape(profile: Profile, layers: int) -> KvShape:
    """Return the shape of a token in `layers` layers, at the profile's scale: one head of the total width."""
    width = -(-profile.kv_layer_bytes // (2 * _ITEM.itemsize))
    return KvShape(layers=layers, heads=1, head_dim=max(1, width), dtype=_ITEM)


def slice_of(shape: KvShape, first: int, last: int, tokens: Sequence[int]) -> KvSlice:
    """Return the slice of the layers `[first, last)` for a sequence's first tokens."""
    data = torch.zeros((last - first, 2, len(tokens), shape.head_dim), dtype=_ITEM)
    data[..., 0] = torch.tensor(tokens, dtype=_ITEM)
    return KvSlice(first=first, last=last, data=data)


def row_items(profile: Profile) -> int:
    """Return the items of a token's hidden state, at the profile's scale."""
    return max(2, -(-profile.hidden_bytes(1) // ROWS.itemsize))


def rows_of(tokens: Sequence[int], layers: int, items: int) -> torch.Tensor:
    """Return the hidden states of tokens behind `layers` layers: their ids, that number, then zeros."""
    rows = torch.zeros((len(tokens), items), dtype=ROWS)
    rows[:, 0] = torch.tensor(tokens, dtype=ROWS)
    rows[:, 1] = layers
    return rows


def check_rows(rows: torch.Tensor, layers: int, tokens: Sequence[int]) -> None:
    """Raise InvalidSequence unless the rows are those of these tokens behind `layers` layers."""
    if bool((rows != rows_of(tokens, layers, rows.shape[1])).any()):
        raise InvalidSequence(f"the hidden states belong to other tokens, or have not passed {layers} layers")


def check_tokens(slices: Sequence[KvSlice], tokens: Sequence[int]) -> None:
    """Raise InvalidSequence if the slices belong to other tokens."""
    known = torch.tensor(tokens, dtype=_ITEM)
    for one in slices:
        count = min(one.tokens, len(tokens))
        if not bool((one.data[:, :, :count, 0] == known[:count]).all()):
            raise InvalidSequence("the keys and values belong to other tokens")
