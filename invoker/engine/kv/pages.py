"""The page allocator of the KV cache: pure, without memory."""

from collections.abc import Sequence

import numpy as np

_FREE, _CLAIMED, _USED = range(3)


class OutOfPages(Exception):
    """Fewer pages are free than were requested; nothing was allocated."""


class PageAllocator:
    """Allocates the pages `[0, total)`, adjacent for each sequence where possible.

    The pages behind a sequence's own that it may still need are *claimed* for it: other sequences get them
    only where nothing else is free. So claims delay no sequence, and pages are scattered only where the cache
    is almost full.
    """

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"a KV cache needs at least one page, not {total}")
        self.total = total
        self._left = total
        self._states = np.full(total, _FREE, dtype=np.int8)
        self._claims: dict[int, int] = {}  # ends of claims, by the last page before them

    def __repr__(self) -> str:
        return f"<PageAllocator {self.used} of {self.total} used>"

    @property
    def free(self) -> int:
        return self._left

    @property
    def used(self) -> int:
        return self.total - self._left

    def allocate(self, count: int, max_count: int = 0) -> tuple[int, ...]:
        """Allocate `count` pages, which may grow to `max_count`. Raises OutOfPages, allocating none."""
        self._check(count)
        if not count:
            return ()
        runs = _runs(self._states == _FREE)
        fitting = [run for run in runs if run[1] - run[0] >= max(count, max_count)]
        if not fitting:
            # The longest run is the most likely to suffice.
            fitting = sorted(runs, key=lambda run: run[0] - run[1])[:1]
        if not fitting or fitting[0][1] - fitting[0][0] < count:
            return self._take(self._scattered(count))
        first, end = fitting[0]
        last, end = first + count - 1, min(end, first + max_count)
        if last + 1 < end:
            self._states[last + 1 : end] = _CLAIMED
            self._claims[last] = end
        return self._take(tuple(range(first, last + 1)))

    def grow(self, pages: Sequence[int], count: int) -> tuple[int, ...]:
        """Allocate `count` more pages for a sequence that has `pages`. Raises OutOfPages, allocating none."""
        self._check(count)
        if not count:
            return ()
        first = pages[-1] + 1
        end = self._claims.pop(pages[-1], first)
        if first + count > self.total or (self._states[first : first + count] == _USED).any():
            self._unclaim(first, end)
            return self._take(self._scattered(count))
        if first + count < end:
            self._claims[first + count - 1] = end
        return self._take(tuple(range(first, first + count)))

    def release(self, pages: Sequence[int]) -> None:
        """Free a sequence's pages, each of which must be in use."""
        if not pages:
            return
        taken = list(pages)
        assert (self._states[taken] == _USED).all(), f"one of the pages {pages} is not in use"
        assert len(set(taken)) == len(taken), f"a page is released twice: {pages}"
        self._unclaim(pages[-1] + 1, self._claims.pop(pages[-1], 0))
        self._states[taken] = _FREE
        self._left += len(taken)

    def check_integrity(self) -> None:
        """Assert that states, claims and the free count agree."""
        assert self._left == int((self._states != _USED).sum()), "a page is lost"
        for last, end in self._claims.items():
            assert self._states[last] == _USED, f"a claim behind page {last}, which is not in use"
            assert last + 1 < end <= self.total, f"an empty claim behind page {last}"

    def _check(self, count: int) -> None:
        if count > self._left:
            raise OutOfPages(f"{count} pages requested, {self._left} free")

    def _take(self, pages: tuple[int, ...]) -> tuple[int, ...]:
        self._states[list(pages)] = _USED
        self._left -= len(pages)
        return pages

    def _unclaim(self, first: int, end: int) -> None:
        claim = self._states[first:end]
        claim[claim == _CLAIMED] = _FREE

    def _scattered(self, count: int) -> tuple[int, ...]:
        """Return unclaimed pages from the lowest, then claimed ones from the highest."""
        free = np.flatnonzero(self._states == _FREE)[:count]
        claimed = np.flatnonzero(self._states == _CLAIMED)[::-1][: count - len(free)]
        return tuple(np.concatenate((free, claimed)).tolist())


def _runs(wanted: np.ndarray) -> list[tuple[int, int]]:
    """Return the maximal runs `[first, end)` in which `wanted` holds, from the lowest."""
    edges = np.flatnonzero(np.diff(wanted, prepend=False, append=False))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
