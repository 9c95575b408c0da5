"""K and V of a sequence outside of a cache: what one engine gives and another takes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from invoker.engine.kv_cache import KvPool, KvShape
from invoker.engine.sequences import BadSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSlice:
    """K and V of a sequence's first tokens in the layers `[first, last)`.

    `data` is contiguous, `[layers, 2 * heads, tokens, head_dim]` in the model's dtype, of each layer first
    the keys, and belongs to whoever holds the slice.
    """

    first: int
    last: int
    data: torch.Tensor

    @property
    def tokens(self) -> int:
        return self.data.shape[2]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


def empty_slice(shape: KvShape, first: int, last: int, tokens: int) -> KvSlice:
    """A slice of the layers `[first, last)` of a model of `shape`, to be filled by `bytes_of_slice`."""
    size = (last - first, 2 * shape.heads, tokens, shape.head_dim)
    return KvSlice(first=first, last=last, data=torch.empty(size, dtype=shape.dtype))


def bytes_of_slice(one: KvSlice) -> memoryview:
    """A slice's bytes, as a view of it: it must be in host memory."""
    return one.data.view(torch.uint8).numpy().reshape(-1).data


def in_host_memory(one: KvSlice) -> KvSlice:
    """The same where `bytes_of_slice` can see it."""
    return replace(one, data=one.data.cpu())


def token_bytes(shape: KvShape) -> int:
    """What a token takes in one layer."""
    return 2 * shape.heads * shape.head_dim * shape.dtype.itemsize


def export_kv(
    pool: KvPool, base: int, layers: tuple[int, int] | None, pages: Sequence[int], tokens: int
) -> KvSlice:
    """Copy a sequence out of a pool whose first layer is `base`; all its layers unless told otherwise."""
    first, last = layers or (base, base + pool.shape.layers)
    if not base <= first < last <= base + pool.shape.layers:
        raise BadSequence(f"the layers [{first}, {last}) are not in {pool!r} from layer {base} on")
    if not tokens:
        raise BadSequence("nothing of the sequence has run yet")
    return KvSlice(first=first, last=last, data=pool.read(slice(first - base, last - base), pages, tokens))


def import_kv(pool: KvPool, pages: Sequence[int], slices: Sequence[KvSlice], tokens: int) -> None:
    """Put the first `tokens` tokens of the slices on a sequence's pages, in a pool of all layers."""
    for one in slices:
        pool.fill(slice(one.first, one.last), pages, one.data[:, :, :tokens])


def usable_tokens(shape: KvShape, slices: Sequence[KvSlice], known: int) -> int:
    """How many of a sequence's `known` tokens the slices save a model of `shape`, which must have each layer
    once: what all have, but for the last token, which always runs. Raises BadSequence."""
    if not slices:
        return 0
    ordered = sorted(slices, key=lambda one: one.first)
    edges = [0, *(edge for one in ordered for edge in (one.first, one.last)), shape.layers]
    if any(a != b for a, b in list(pairwise(edges))[::2]):
        raise BadSequence(f"slices of the layers {[(s.first, s.last) for s in ordered]} of {shape.layers}")
    for one in ordered:
        wanted = (one.last - one.first, 2 * shape.heads, one.tokens, shape.head_dim)
        if tuple(one.data.shape) != wanted or one.data.dtype != shape.dtype:
            raise BadSequence(f"K and V of shape {tuple(one.data.shape)}, {one.data.dtype}: not this model's")
    return min(known - 1, *(one.tokens for one in ordered))
