"""Time as a parameter: a protocol, the real clock, and a fake that tests advance."""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time: `wall_s()` (Unix seconds) for records, `monotonic_s()` for durations."""

    def wall_s(self) -> float: ...

    def monotonic_s(self) -> float: ...


class SystemClock:
    """The clock of the operating system."""

    wall_s = staticmethod(time.time)
    monotonic_s = staticmethod(time.monotonic)


class FakeClock:
    """A clock that moves only by `advance`; `step_wall` steps the time of day alone."""

    def __init__(self, wall_s: float = 1_700_000_000.0, monotonic_s: float = 1000.0) -> None:
        self._wall_s = wall_s
        self._monotonic_s = monotonic_s

    def wall_s(self) -> float:
        return self._wall_s

    def monotonic_s(self) -> float:
        return self._monotonic_s

    def advance(self, seconds: float) -> None:
        """Advance both clocks."""
        self._wall_s += seconds
        self._monotonic_s += seconds

    def step_wall(self, seconds: float) -> None:
        """Step the time of day, as an operator or NTP does; durations are unaffected."""
        self._wall_s += seconds
