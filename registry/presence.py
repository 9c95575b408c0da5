"""How long a node held an instance, from intervals in the order of their ends. Pure."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Presence:
    """The union of intervals of one process, and what they were allocated, in microseconds."""

    intervals: int = 0
    allocated_us: int = 0
    _stays: list[tuple[int, int]] = field(default_factory=list)  # disjoint `[from, to)`, in order

    def add(self, from_us: int, to_us: int, allocated_us: int) -> None:
        """Count an interval that ends no earlier than those before."""
        self.intervals += 1
        self.allocated_us += allocated_us
        while self._stays and self._stays[-1][1] >= from_us:
            before_from_us, before_to_us = self._stays.pop()
            from_us, to_us = min(from_us, before_from_us), max(to_us, before_to_us)
        self._stays.append((from_us, to_us))

    @property
    def present_us(self) -> int:
        """How long there was at least one."""
        return sum(to_us - from_us for from_us, to_us in self._stays)
