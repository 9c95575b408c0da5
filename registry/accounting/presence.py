"""The time during which a node held an instance, from intervals in the order of their ends. Pure."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Presence:
    """The union of the intervals of one process, and their allocated time, in microseconds.

    Each moment of presence counts once for each of the `gpu_count` accelerators of the process.

    Where only those that overlap `[since_us, until_us)` are known, only the presence in it is.
    """

    since_us: int | None = None
    until_us: int | None = None
    gpu_count: int = 1
    intervals: int = 0
    allocated_us: int = 0
    outside_us: int = 0  # the maximum part of it outside the span
    _stays: list[tuple[int, int]] = field(default_factory=list)  # disjoint `[from, to)`, in order

    def add(self, from_us: int, to_us: int, allocated_us: int) -> None:
        """Add an interval that ends no earlier than those before."""
        self.intervals += 1
        self.allocated_us += allocated_us
        low_us = from_us if self.since_us is None else max(from_us, self.since_us)
        high_us = to_us if self.until_us is None else max(low_us, min(to_us, self.until_us))
        self.outside_us += min(allocated_us, (to_us - from_us - (high_us - low_us)) * self.gpu_count)
        from_us, to_us = low_us, high_us
        while self._stays and self._stays[-1][1] >= from_us:
            before_from_us, before_to_us = self._stays.pop()
            from_us, to_us = min(from_us, before_from_us), max(to_us, before_to_us)
        self._stays.append((from_us, to_us))

    @property
    def over_us(self) -> int:
        """The minimum allocated time beyond the presence; negative where it was less."""
        over_us = self.allocated_us - self.present_us
        return min(over_us, 0) if over_us <= self.outside_us else over_us - self.outside_us

    @property
    def present_us(self) -> int:
        """The accelerators' time with at least one interval."""
        return self.gpu_count * sum(to_us - from_us for from_us, to_us in self._stays)
