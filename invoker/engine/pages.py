"""The page allocator of the KV cache: pure bookkeeping, no memory."""

import heapq
from collections.abc import Iterable


class OutOfPages(Exception):
    """Fewer pages are free than were asked for; nothing was taken."""


class PageAllocator:
    """Hands out the pages `[0, total)`, lowest first, so that a lone sequence gets a contiguous run."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"a KV cache needs at least one page, not {total}")
        self.total = total
        self._free = list(range(total))
        self._used: set[int] = set()

    def __repr__(self) -> str:
        return f"<PageAllocator {len(self._used)} of {self.total} used>"

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return len(self._used)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Take `count` pages, or raise OutOfPages and take none."""
        if count > len(self._free):
            raise OutOfPages(f"{count} pages asked for, {len(self._free)} free")
        pages = tuple(heapq.heappop(self._free) for _ in range(count))
        self._used.update(pages)
        return pages

    def release(self, pages: Iterable[int]) -> None:
        """Give pages back. Releasing a page that is not in use is a bug of ours."""
        for page in pages:
            assert page in self._used, f"page {page} is not in use"
            self._used.remove(page)
            heapq.heappush(self._free, page)

    def check_integrity(self) -> None:
        """Assert that every page is either free or used, and none is both."""
        assert len(set(self._free)) == len(self._free), "a page is free twice"
        assert self._used.isdisjoint(self._free), "a page is both free and used"
        assert self._used.union(self._free) == set(range(self.total)), "a page is lost"
