"""The layout of one step: a ragged batch, flattened, and the index tensors that all layers share."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Protocol, TypeVar

import numpy as np
import torch

from invoker.engine.kv.cache import PAGE_TOKENS
from invoker.engine.scheduling.scheduler import Chunk

# Sequences decode together, padded to the longest of their group: none is padded to more than twice
# its length, except within this many pages, where another call costs more than the padding.
_SMALL_PAGES = 16
# On a CPU longer sequences decode one by one, over their keys in place: a group's keys are copied.
_COPIED_PAGES_CPU = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """One attention call: rows `[first, last)` of the batch, `queries` tokens of each of `sequences`.

    The keys are in `runs` of slots, one `[first, last)` a sequence, or, where they are scattered, on `pages`
    (a flat int64 index, sequence by sequence), of which the tokens `[key_first, key_last)` count. With
    `fresh` the queries' own keys are all keys, so the cache need not be read. `mask` is added to the scores;
    without one, a call of more than one query is causal.
    """

    first: int
    last: int
    sequences: int
    queries: int
    runs: tuple[tuple[int, int], ...]
    pages: torch.Tensor | None
    key_first: int
    key_last: int
    fresh: bool
    mask: torch.Tensor | None


class AttentionMetadata(Protocol):
    """The metadata of a step: positions and cache slots, int64 `[tokens]`, and the attention calls."""

    @property
    def positions(self) -> torch.Tensor: ...

    @property
    def slots(self) -> torch.Tensor: ...

    def calls(self, window: int | None) -> tuple[AttentionCall, ...]:
        """Return the attention calls of a layer with a window of `window` tokens (None: unlimited)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout:
    """The chunks of a step in the order of the batch, and their index tensors.

    Chunks of one token come first, in order of length; `logit_rows` are the rows that yield a next token, in
    the order of `sampled`. Attention calls depend on the layer's window, so they are built at first use and
    cached.
    """

    chunks: tuple[Chunk, ...]
    sampled: tuple[str, ...]
    positions: torch.Tensor
    slots: torch.Tensor
    logit_rows: torch.Tensor
    dtype: torch.dtype
    _calls: dict[int | None, tuple[AttentionCall, ...]] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return self.positions.numel()

    def calls(self, window: int | None) -> tuple[AttentionCall, ...]:
        """Return the attention calls of a layer with a window of `window` tokens (None: unlimited)."""
        if window not in self._calls:
            self._calls[window] = _calls(self, window)
        return self._calls[window]


class _Span(Protocol):
    @property
    def start(self) -> int: ...

    @property
    def count(self) -> int: ...


_AnyChunk = TypeVar("_AnyChunk", bound=_Span)


def batch_order(chunks: Iterable[_AnyChunk]) -> list[_AnyChunk]:
    """Return the chunks in batch order; the sort is stable and idempotent."""
    return sorted(chunks, key=lambda chunk: (chunk.count > 1, chunk.start if chunk.count == 1 else 0))


def build_layout(chunks: Iterable[Chunk], dtype: torch.dtype, device: torch.device) -> StepLayout:
    """Lay the chunks out, with the index tensors on `device`."""
    ordered = batch_order(chunks)
    counts = [c.count for c in ordered]
    alone = counts.count(1)
    positions = [np.array([c.start for c in ordered[:alone]], dtype=np.int64)]
    slots = [np.array([_slot(c) for c in ordered[:alone]], dtype=np.int64)]
    positions += [np.arange(c.start, c.start + c.count) for c in ordered[alone:]]
    slots += [_slots(c) for c in ordered[alone:]]
    ends = np.cumsum(counts) - 1
    sampled = [i for i, c in enumerate(ordered) if c.last]
    return StepLayout(
        chunks=tuple(ordered),
        sampled=tuple(ordered[i].request_id for i in sampled),
        positions=torch.from_numpy(np.concatenate(positions)).to(device),
        slots=torch.from_numpy(np.concatenate(slots)).to(device),
        logit_rows=torch.from_numpy(ends[sampled]).to(device),
        dtype=dtype,
    )


def group_by_length(pages: Sequence[int]) -> list[tuple[int, int]]:
    """Cut an ascending list of page counts into runs `[a, b)` that are worth padding to their longest."""
    groups: list[tuple[int, int]] = []
    start = 0
    for i, count in enumerate(pages):
        if count > max(_SMALL_PAGES, 2 * pages[start]):
            groups.append((start, i))
            start = i
    if start < len(pages):
        groups.append((start, len(pages)))
    return groups


def _slot(chunk: Chunk) -> int:
    page, offset = divmod(chunk.start, PAGE_TOKENS)
    return chunk.pages[page] * PAGE_TOKENS + offset


def _slots(chunk: Chunk) -> np.ndarray:
    positions = np.arange(chunk.start, chunk.start + chunk.count)
    pages = np.asarray(chunk.pages, dtype=np.int64)
    return pages[positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS


def _calls(layout: StepLayout, window: int | None) -> tuple[AttentionCall, ...]:
    decoding = [c for c in layout.chunks if c.count == 1]
    spans = [_page_span(c, window) for c in decoding]
    # With a window the spans do not ascend strictly with the length; order matters only for padding.
    lengths = [last - first for first, last in spans]
    together = len(decoding)
    if layout.positions.device.type == "cpu":
        together = next((i for i, length in enumerate(lengths) if length > _COPIED_PAGES_CPU), together)
    groups = group_by_length(lengths[:together])
    calls = [_decode_call(layout, decoding[a:b], spans[a:b], a, window) for a, b in groups]
    calls += _uncopied_calls(layout, decoding[together:], together, window)
    row = len(decoding)
    for chunk in layout.chunks[len(decoding) :]:
        calls.append(_single_call(layout, chunk, row, window))
        row += chunk.count
    return tuple(calls)


def _uncopied_calls(
    layout: StepLayout, chunks: Sequence[Chunk], row: int, window: int | None
) -> list[AttentionCall]:
    """Return calls for chunks of one token that are not worth a copy: neighbours on runs share one call."""
    calls = [_single_call(layout, chunk, i, window) for i, chunk in enumerate(chunks, row)]
    merged: list[AttentionCall] = []
    for apart, neighbours in groupby(calls, key=lambda call: call.pages is not None):
        group = list(neighbours)
        if apart:
            merged += group
        else:
            runs = tuple(run for call in group for run in call.runs)
            merged.append(replace(group[0], last=group[-1].last, sequences=len(runs), runs=runs))
    return merged


def _page_span(chunk: Chunk, window: int | None) -> tuple[int, int]:
    """Return the pages `[first, last)` of a chunk's sequence that its queries see."""
    first = 0 if window is None else max(0, chunk.start - window + 1) // PAGE_TOKENS
    return first, (chunk.start + chunk.count - 1) // PAGE_TOKENS + 1


def _decode_call(
    layout: StepLayout,
    chunks: Sequence[Chunk],
    spans: Sequence[tuple[int, int]],
    row: int,
    window: int | None,
) -> AttentionCall:
    if len(chunks) == 1:
        return _single_call(layout, chunks[0], row, window)
    width = max(last - first for first, last in spans)
    # Padding repeats a page of the sequence itself: masked, and never another sequence's numbers.
    table = np.empty((len(chunks), width), dtype=np.int64)
    for i, (chunk, (first, last)) in enumerate(zip(chunks, spans, strict=True)):
        table[i] = chunk.pages[first]
        table[i, : last - first] = chunk.pages[first:last]
    keys = np.arange(width * PAGE_TOKENS)[None, :] + np.array([first for first, _ in spans])[:, None] * (
        PAGE_TOKENS
    )
    queries = np.array([chunk.start for chunk in chunks])[:, None]
    return AttentionCall(
        first=row,
        last=row + len(chunks),
        sequences=len(chunks),
        queries=1,
        runs=(),
        pages=torch.from_numpy(table.ravel()).to(layout.positions.device),
        key_first=0,
        key_last=width * PAGE_TOKENS,
        fresh=False,
        mask=_mask(layout, _visible(queries, keys, window))[:, None, None, :],
    )


def _single_call(layout: StepLayout, chunk: Chunk, row: int, window: int | None) -> AttentionCall:
    first, last = _page_span(chunk, window)
    end = chunk.start + chunk.count
    begin = 0 if window is None else max(0, chunk.start - window + 1)
    pages = chunk.pages[first:last]
    apart = pages != tuple(range(pages[0], pages[0] + len(pages)))
    offset = (pages[0] - first) * PAGE_TOKENS
    mask = None
    # One query sees all of [begin, end); a causal call starts where its keys start.
    if chunk.count > 1 and (chunk.start > 0 or (window is not None and end > window)):
        queries = np.arange(chunk.start, end)[:, None]
        mask = _mask(layout, _visible(queries, np.arange(begin, end)[None, :], window))[None, None]
    return AttentionCall(
        first=row,
        last=row + chunk.count,
        sequences=1,
        queries=chunk.count,
        runs=() if apart else ((begin + offset, end + offset),),
        pages=torch.tensor(pages, device=layout.positions.device) if apart else None,
        key_first=begin - first * PAGE_TOKENS,
        key_last=end - first * PAGE_TOKENS,
        fresh=chunk.start == 0,
        mask=mask,
    )


def _visible(queries: np.ndarray, keys: np.ndarray, window: int | None) -> np.ndarray:
    visible = keys <= queries
    return visible if window is None else visible & (keys > queries - window)


def _mask(layout: StepLayout, visible: np.ndarray) -> torch.Tensor:
    device = layout.positions.device
    mask = torch.zeros(visible.shape, dtype=layout.dtype, device=device)
    return mask.masked_fill_(torch.from_numpy(~visible).to(device), float("-inf"))
