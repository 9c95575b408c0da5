"""A set of bytes as sorted, disjoint, half-open intervals (pure)."""

from bisect import bisect_left, bisect_right


class IntervalSet:
    """Intervals `[start, end)`; touching ones are merged."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def __repr__(self) -> str:
        return f"IntervalSet({' '.join(f'[{start},{end})' for start, end in self.ranges)})"

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        return tuple(zip(self._starts, self._ends, strict=True))

    def add(self, start: int, end: int) -> int:
        """Add `[start, end)`; return the number of bytes that were not in the set."""
        if start >= end:
            return 0
        first = bisect_left(self._ends, start)
        last = bisect_right(self._starts, end)
        if first < last:
            start = min(start, self._starts[first])
            end = max(end, self._ends[last - 1])
        before = sum(self._ends[first:last]) - sum(self._starts[first:last])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]
        return end - start - before

    def covers(self, start: int, end: int) -> bool:
        """Return whether all of `[start, end)` is in the set; an empty range always is."""
        if start >= end:
            return True
        index = bisect_right(self._starts, start) - 1
        return index >= 0 and end <= self._ends[index]

    def missing(self, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """Return the parts of `[start, end)` that are not in the set."""
        gaps = []
        for have_start, have_end in self.ranges:
            if have_end <= start:
                continue
            if have_start >= end:
                break
            if have_start > start:
                gaps.append((start, have_start))
            start = have_end
        if start < end:
            gaps.append((start, end))
        return tuple(gaps)
