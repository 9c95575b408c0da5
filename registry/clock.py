"""Time as a parameter: a protocol, the real clock, and a fake that tests move by hand."""

import time
from typing import Protocol


class Clock(Protocol):
    """`wall_s()` is for records (Unix seconds); `monotonic_s()` is for durations and deadlines."""

    def wall_s(self) -> float: ...

    def monotonic_s(self) -> float: ...


class SystemClock:
    wall_s = staticmethod(time.time)
    monotonic_s = staticmethod(time.monotonic)


class FakeClock:
    """A clock that stands still until `advance` is called; `step_wall` sets the time of day alone."""

    def __init__(self, wall_s: float = 1_700_000_000.0, monotonic_s: float = 1000.0) -> None:
        self._wall_s = wall_s
        self._monotonic_s = monotonic_s

    def wall_s(self) -> float:
        return self._wall_s

    def monotonic_s(self) -> float:
        return self._monotonic_s

    def advance(self, seconds: float) -> None:
        self._wall_s += seconds
        self._monotonic_s += seconds

    def step_wall(self, seconds: float) -> None:
        """What an operator or NTP does: durations go on as if nothing had happened."""
        self._wall_s += seconds
