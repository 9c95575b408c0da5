"""An allocator of one address range, from either end (bookkeeping only)."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from registry.images.manifest import ALIGNMENT


@dataclass(frozen=True, slots=True)
class MemorySpan:
    """The bytes `[offset, offset + nbytes)`."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


def align_up(nbytes: int) -> int:
    """Round `nbytes` up to a multiple of ALIGNMENT, at least one."""
    return max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)


class Allocator:
    """A first-fit allocator of aligned spans of `[0, capacity)`, from its start or its end.

    Free spans are ordered by offset and never adjacent: those that would be are merged.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes // ALIGNMENT * ALIGNMENT
        self._free = [MemorySpan(0, self._capacity)] if self._capacity else []
        self._used: dict[int, MemorySpan] = {}

    def __repr__(self) -> str:
        return (
            f"<Allocator {self.free_bytes} of {self._capacity} bytes free, "
            f"largest {self.largest_free_bytes}, {len(self._used)} spans used>"
        )

    @property
    def capacity_bytes(self) -> int:
        return self._capacity

    @property
    def free_bytes(self) -> int:
        return sum(span.nbytes for span in self._free)

    @property
    def largest_free_bytes(self) -> int:
        return max((span.nbytes for span in self._free), default=0)

    def largest_if_freed(self, spans: Iterable[MemorySpan]) -> int:
        """Return the size of the largest free span if these allocated ones were free."""
        largest = start = end = 0
        for span in sorted([*self._free, *spans], key=lambda span: span.offset):
            start, end = (start if span.offset == end else span.offset), span.end
            largest = max(largest, end - start)
        return largest

    def allocate(self, nbytes: int, *, at_end: bool = False) -> MemorySpan | None:
        """Allocate from the lowest free span of at least `nbytes`, or from the highest; None without one."""
        if nbytes < 0:
            raise ValueError(f"cannot allocate {nbytes} bytes")
        need = align_up(nbytes)
        fitting = [index for index, span in enumerate(self._free) if span.nbytes >= need]
        if not fitting:
            return None
        index = fitting[-1 if at_end else 0]
        span = self._free[index]
        taken = MemorySpan(span.end - need if at_end else span.offset, need)
        if span.nbytes == need:
            del self._free[index]
        else:
            left = span.offset if at_end else taken.end
            self._free[index] = MemorySpan(left, span.nbytes - need)
        self._used[taken.offset] = taken
        return taken

    def free(self, span: MemorySpan) -> None:
        """Free a span. Raises ValueError if it is not allocated."""
        if self._used.get(span.offset) != span:
            raise ValueError(f"{span} is not allocated")
        del self._used[span.offset]
        index = bisect_left(self._free, span.offset, key=lambda free: free.offset)
        start, end = span.offset, span.end
        if index < len(self._free) and self._free[index].offset == end:
            end = self._free.pop(index).end
        if index > 0 and self._free[index - 1].end == start:
            index -= 1
            start = self._free.pop(index).offset
        self._free.insert(index, MemorySpan(start, end - start))

    def check_integrity(self) -> None:
        """Assert that free and used spans tile the range, aligned, without adjacent free spans."""
        spans = sorted([*self._free, *self._used.values()], key=lambda span: span.offset)
        position = 0
        for span in spans:
            assert span.offset == position, f"gap or overlap at {position}: {span}"
            assert span.nbytes > 0 and span.nbytes % ALIGNMENT == 0, f"bad size: {span}"
            position = span.end
        assert position == self._capacity, f"spans end at {position}, not {self._capacity}"
        for left, right in zip(self._free, self._free[1:], strict=False):
            assert left.end < right.offset, f"free spans touch or are out of order: {left}, {right}"
