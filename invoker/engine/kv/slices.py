"""K and V of a sequence outside a cache: the format in which one engine exports and another imports them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from invoker.engine.kv.cache import KvPool, KvShape
from invoker.engine.scheduling.sequence_table import InvalidSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSlice:
    """K and V of a sequence's first tokens in the layers `[first, last)`.

    `data` is contiguous, `[layers, 2 * heads, tokens, head_dim]` in the model's dtype, with the keys of each
    layer first. The holder of the slice owns it.
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
    """Return a slice of the layers `[first, last)` of a model of `shape`, to be filled."""
    data = torch.empty(shape.slice_size(last - first, tokens), dtype=shape.dtype)
    return KvSlice(first=first, last=last, data=data)


def tensor_bytes(data: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in host memory as a view."""
    return data.view(torch.uint8).numpy().reshape(-1).data


def in_host_memory(one: KvSlice) -> KvSlice:
    """Return the slice in host memory, where `tensor_bytes` can view it."""
    return replace(one, data=one.data.cpu())


def export_kv(
    pool: KvPool, base: int, layers: tuple[int, int] | None, pages: Sequence[int], tokens: int
) -> KvSlice:
    """Copy a sequence out of a pool with first layer `base`; all layers of the pool if `layers` is None."""
    first, last = layers or (base, base + pool.shape.layers)
    if not base <= first < last <= base + pool.shape.layers:
        raise InvalidSequence(f"the layers [{first}, {last}) are not in {pool!r} from layer {base} on")
    if not tokens:
        raise InvalidSequence("nothing of the sequence has run yet")
    return KvSlice(first=first, last=last, data=pool.read(slice(first - base, last - base), pages, tokens))


def import_kv(pool: KvPool, pages: Sequence[int], slices: Sequence[KvSlice], tokens: int) -> None:
    """Copy the first `tokens` tokens of the slices to a sequence's pages, in a pool of all layers."""
    for one in slices:
        pool.fill(slice(one.first, one.last), pages, one.data[:, :, :tokens])


def usable_tokens(shape: KvShape, slices: Sequence[KvSlice], known: int) -> int:
    """Return how many of a sequence's `known` tokens a model of `shape` need not run, given the slices.

    The slices must cover each layer once. The last token always runs. Raises InvalidSequence.
    """
    if not slices:
        return 0
    ordered = sorted(slices, key=lambda one: one.first)
    edges = [0, *(edge for one in ordered for edge in (one.first, one.last)), shape.layers]
    if any(a != b for a, b in list(pairwise(edges))[::2]):
        raise InvalidSequence(
            f"slices of the layers {[(s.first, s.last) for s in ordered]} of {shape.layers}"
        )
    for one in ordered:
        wanted = shape.slice_size(one.last - one.first, one.tokens)
        if tuple(one.data.shape) != wanted or one.data.dtype != shape.dtype:
            raise InvalidSequence(
                f"K and V of shape {tuple(one.data.shape)}, {one.data.dtype}: not this model's"
            )
    return min(known - 1, *(one.tokens for one in ordered))
