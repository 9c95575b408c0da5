"""When to start a child again that died: pure."""

from dataclasses import dataclass

FIRST_S = 0.1
LONGEST_S = 10.0
STABLE_S = 20.0


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits that double while a child keeps dying young, and start over once it has lived."""

    failures: int = 0

    def after(self, lived_s: float) -> "Backoff":
        return Backoff(1 if lived_s >= STABLE_S else self.failures + 1)

    @property
    def wait_s(self) -> float:
        if self.failures == 0:
            return 0.0
        return min(LONGEST_S, FIRST_S * 2 ** min(self.failures - 1, 16))
