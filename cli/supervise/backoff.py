"""When to start a child again that died: pure."""

from dataclasses import dataclass

FIRST_S = 0.1
LONGEST_S = 10.0
# Who lived longer did not die of its start.
YOUNG_S = 5.0
# A SIGKILL comes from outside, most often once; where it is the kernel's for want of memory, the pause
# grows up to this step only: 0.1, 0.2, 0.4 s.
_KILLED_STEPS = 3


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits that double while a child keeps dying of itself right after its start."""

    failures: int = 0

    def after(self, lived_s: float, *, killed: bool = False) -> "Backoff":
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
