"""The clock of an emulated device: work takes its emulated time, one item after the other."""

import threading
import time
from collections.abc import Callable

# Work that arrives within this time after the end of the previous work counts as queued before it ended, as
# engines and drivers do: a wake-up that a busy machine delays a little does not make the device slower.
LATE_S = 2e-3


class WorkQueue:
    """The end times of work on a device (pure). Each second of work lasts `slower` seconds."""

    def __init__(self, slower: int) -> None:
        self.slower = slower
        self._free_s = float("-inf")

    def book(self, now_s: float, seconds: float) -> float:
        """Queue work of `seconds`; return the time at which it ends."""
        late_s = now_s - self._free_s
        start_s = now_s if late_s > LATE_S * self.slower else self._free_s
        self._free_s = start_s + seconds * self.slower
        return self._free_s


class DeviceClock:
    """A device on which each thread waits, asleep, until its computation or copy has ended."""

    def __init__(
        self,
        slower: int = 1,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._queue = WorkQueue(slower)
        self._lock = threading.Lock()
        self._now = now
        self._sleep = sleep

    def run(self, seconds: float) -> float:
        """Wait until the device has run work of `seconds`, behind all earlier work; return its duration.

        Part of that duration may be in the past already (see LATE_S).
        """
        with self._lock:
            until_s = self._queue.book(self._now(), seconds)
        left_s = until_s - self._now()
        if left_s > 0:
            self._sleep(left_s)
        return seconds * self._queue.slower
