"""The paged KV cache: one pool of pages for all layers, in memory that the caller reserved."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from invoker.engine.contract import OutOfKvCache

PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """The shape of a token's K and V: `layers` layers, `heads` heads of `head_dim` elements each."""

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def page_bytes(self) -> int:
        return 2 * self.layers * PAGE_TOKENS * self.heads * self.head_dim * self.dtype.itemsize

    def slice_size(self, layers: int, tokens: int) -> tuple[int, int, int, int]:
        """Return the size of K and V outside a cache: `[layers, 2 * heads, tokens, head_dim]`."""
        return layers, 2 * self.heads, tokens, self.head_dim

    def pages_in(self, nbytes: int) -> int:
        """Return the number of pages in that memory. Raises OutOfKvCache if there is none."""
        if nbytes < self.page_bytes:
            raise OutOfKvCache(f"{nbytes} bytes are less than one page of {self.page_bytes} bytes")
        return nbytes // self.page_bytes


class KvPool:
    """K and V of each layer, `[1, heads, pages * PAGE_TOKENS, head_dim]`, as views of `memory`.

    Page numbers are the same in all layers. A head's tokens on neighbouring pages are adjacent, so that
    attention reads them in place: several times as fast as a copy of scattered pages. A page is cleared when
    it is allocated: attention over a copy reads whole pages and masks what follows a sequence's end, and a
    mask does not stop a NaN.
    """

    def __init__(self, shape: KvShape, memory: torch.Tensor) -> None:
        self.shape = shape
        self.pages = shape.pages_in(memory.numel())
        pool = memory[: self.pages * shape.page_bytes].view(shape.dtype)
        # In each layer the heads of K come first, then those of V.
        self._pool = pool.view(shape.layers, 2 * shape.heads, self.pages, PAGE_TOKENS, shape.head_dim)
        slots = [layer.flatten(1, 2) for layer in self._pool]
        self._rows = tuple(layer.transpose(0, 1) for layer in slots)
        self.layers = tuple((layer[None, : shape.heads], layer[None, shape.heads :]) for layer in slots)
        self.on_write: Callable[[int, torch.Tensor], None] | None = None  # gets each layer's entries

    def __repr__(self) -> str:
        return f"<KvPool {self.pages} pages of {PAGE_TOKENS} tokens, {len(self.layers)} layers>"

    @property
    def tokens(self) -> int:
        return self.pages * PAGE_TOKENS

    def clear(self, pages: torch.Tensor) -> None:
        """Zero whole pages in all layers."""
        self._pool.index_fill_(2, pages, 0)

    def write(self, layer: int, slots: torch.Tensor, entries: torch.Tensor) -> None:
        """Store `entries`, `[tokens, 2 * heads, head_dim]`, at `slots` (page * PAGE_TOKENS + offset).

        Each token has all keys first, then all values.
        """
        self._rows[layer].index_copy_(0, slots, entries)
        if self.on_write is not None:
            self.on_write(layer, entries)

    def read(self, layers: slice, pages: Sequence[int], tokens: int) -> torch.Tensor:
        """Return a copy of a sequence's first `tokens` tokens, `[layers, 2 * heads, tokens, head_dim]`.

        The copy is contiguous, with the keys of each layer first.
        """
        rows = self._pool[layers].flatten(2, 3)
        if _are_adjacent(pages):
            found = rows.narrow(2, pages[0] * PAGE_TOKENS, tokens)
            return found.clone(memory_format=torch.contiguous_format)
        return rows.index_select(2, self._slots(pages, tokens))

    def fill(self, layers: slice, pages: Sequence[int], entries: torch.Tensor) -> None:
        """Store the output of `read` from a sequence's first token on."""
        rows, tokens = self._pool[layers].flatten(2, 3), entries.shape[2]
        if _are_adjacent(pages):
            rows.narrow(2, pages[0] * PAGE_TOKENS, tokens).copy_(entries)
        else:
            rows.index_copy_(2, self._slots(pages, tokens), entries.to(rows.device))

    def _slots(self, pages: Sequence[int], tokens: int) -> torch.Tensor:
        starts = torch.tensor(pages, device=self._pool.device) * PAGE_TOKENS
        return (starts[:, None] + torch.arange(PAGE_TOKENS, device=starts.device)).flatten()[:tokens]


def _are_adjacent(pages: Sequence[int]) -> bool:
    return tuple(pages) == tuple(range(pages[0], pages[0] + len(pages)))


def pages_for(tokens: int) -> int:
    """Return the number of pages that `tokens` tokens take."""
    return -(-tokens // PAGE_TOKENS)
