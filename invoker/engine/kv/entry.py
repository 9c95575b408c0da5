"""Prompts that enter a model behind its first layers, which ran elsewhere."""

import math
from dataclasses import dataclass

import torch

from invoker.engine.kv.cache import KvShape
from invoker.engine.kv.slices import KvSlice
from invoker.engine.scheduling.sequence_table import InvalidSequence
from invoker.engine.stage_contract import rows_from_bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerEntry:
    """Where a prompt enters a model: behind its first layers, which ran elsewhere.

    `rows` are the hidden states of all of its tokens, `[tokens, items]`: the input of the next layer. `kv` is
    K and V of all of its tokens in the layers that ran.
    """

    rows: torch.Tensor
    kv: KvSlice

    @property
    def layers(self) -> int:
        """The number of layers that ran."""
        return self.kv.last


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryFormat:
    """What an engine accepts as entries: the shape of its K and V, and of a hidden state.

    `step_tokens` is the number of prompt tokens in a step with entries, each by the layers it has left.
    """

    kv: KvShape
    row_dtype: torch.dtype
    row_items: int
    step_tokens: int

    @property
    def row_bytes(self) -> int:
        return self.row_items * self.row_dtype.itemsize

    def kv_bytes(self, layers: int, tokens: int) -> int:
        """Return the bytes of K and V of `tokens` tokens in `layers` layers."""
        return math.prod(self.kv.slice_size(layers, tokens)) * self.kv.dtype.itemsize

    def share(self, entry: LayerEntry) -> float:
        """Return the share of the layers that a prompt has left to run."""
        return 1 - entry.layers / self.kv.layers

    def parse(self, layers: int, tokens: int, hidden: memoryview, kv: memoryview) -> LayerEntry:
        """Return views of the hidden states and of K and V, as they are sent. Raises InvalidSequence."""
        wanted = tokens * self.row_bytes, self.kv_bytes(layers, tokens)
        if not 0 < layers < self.kv.layers or tokens < 1 or (len(hidden), len(kv)) != wanted:
            raise InvalidSequence(
                f"{len(hidden)} and {len(kv)} bytes are not {tokens} tokens behind {layers} of "
                f"{self.kv.layers} layers: these have {wanted[0]} and {wanted[1]}"
            )
        data = torch.frombuffer(kv, dtype=self.kv.dtype).view(self.kv.slice_size(layers, tokens))
        rows = rows_from_bytes(hidden, self.row_dtype, self.row_items)
        return LayerEntry(rows=rows, kv=KvSlice(first=0, last=layers, data=data))

    def check(self, entry: LayerEntry, known: int) -> None:
        """Raise InvalidSequence unless the entry is of this format and of a sequence of `known` tokens."""
        found = tuple(entry.rows.shape), entry.rows.dtype, tuple(entry.kv.data.shape), entry.kv.data.dtype
        size = self.kv.slice_size(entry.layers, known)
        wanted = (known, self.row_items), self.row_dtype, size, self.kv.dtype
        if entry.kv.first or not 0 < entry.layers < self.kv.layers or found != wanted:
            raise InvalidSequence(f"hidden states and K and V {found} of {known} tokens: not {wanted}")
