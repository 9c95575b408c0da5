"""The choice of the requests that are traced."""

import random
from collections.abc import Callable


class TraceSampler:
    """Takes a share of the requests, all that their callers trace, and at most `rate` new ones a second.

    The rate bounds what tracing costs, whatever the load; a second's worth may come at once.
    """

    def __init__(
        self,
        share: float,
        rate: int,
        now_s: Callable[[], float],
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._share = share
        self._rate = rate
        self._now_s = now_s
        self._chance = chance
        self._left = float(rate)
        self._at_s = now_s()

    def __repr__(self) -> str:
        return f"<TraceSampler {self._share:g} of the requests, at most {self._rate}/s>"

    def takes(self, caller_samples: bool | None) -> bool:
        """Return whether to trace a request; its caller may have decided (None: it has not)."""
        if caller_samples is None:
            caller_samples = self._share > 0 and self._chance() < self._share
        if not caller_samples:
            return False
        now_s = self._now_s()
        self._left = min(self._rate, self._left + (now_s - self._at_s) * self._rate)
        self._at_s = now_s
        if self._left < 1:
            return False
        self._left -= 1
        return True
