"""The time of a device that is not there: what it is given to do takes so long, one thing after the other."""

import threading
import time
from collections.abc import Callable

# Who comes back this soon after the end of the last work is taken to have queued it before, as engines and
# drivers do: a wake-up that a busy machine delays a little does not make the device slower.
LATE_S = 2e-3


class WorkQueue:
    """When work ends that a device is given (pure). Each second of it lasts `slower` seconds."""

    def __init__(self, slower: int) -> None:
        self.slower = slower
        self._free_s = float("-inf")

    def book(self, now_s: float, seconds: float) -> float:
        """The moment at which work ends that is given now."""
        late_s = now_s - self._free_s
        began_s = now_s if late_s > LATE_S * self.slower else self._free_s
        self._free_s = began_s + seconds * self.slower
        return self._free_s


class DeviceClock:
    """What runs on the device, or is copied to it, waits here in its own thread, asleep."""

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
        """Return when the device has done this, behind all that it was given before: how long it took. A part
        of that may have gone by before it was asked for (see LATE_S)."""
        with self._lock:
            until_s = self._queue.book(self._now(), seconds)
        left_s = until_s - self._now()
        if left_s > 0:
            self._sleep(left_s)
        return seconds * self._queue.slower
