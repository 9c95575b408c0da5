"""Delays before restarts of a child that died. Pure."""

from dataclasses import dataclass

FIRST_S = 0.1
LONGEST_S = 10.0
# A child that lived longer did not fail at its start.
YOUNG_S = 5.0
# A SIGKILL comes from outside, most often once; repeated ones (out of memory) increase the delay only up
# to this step: 0.1, 0.2, 0.4 s.
_KILLED_STEPS = 3


@dataclass(frozen=True, slots=True)
class Backoff:
    """A delay that doubles while a child keeps failing right after its start."""

    failures: int = 0

    def after(self, lived_s: float, *, killed: bool = False) -> "Backoff":
        """Return the backoff after a child that ran for `lived_s`."""
        if lived_s >= YOUNG_S:
            return Backoff(1)
        if killed:
            return Backoff(min(self.failures + 1, _KILLED_STEPS))
        return Backoff(self.failures + 1)

    @property
    def wait_s(self) -> float:
        if self.failures == 0:
            return 0.0
        return min(LONGEST_S, FIRST_S * 2 ** min(self.failures - 1, 16))
