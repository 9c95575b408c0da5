"""The clock of an emulated device: work takes its emulated time, one item after the other."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

STEP_LATE_S = 2e-3
HOP_LATE_S = 0.2e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Lateness:
    """How late work may arrive after the end of the previous work and still count as queued before it ended.

    In seconds of the device. Engines prepare a step while the one before runs, so that a wake-up which a busy
    machine delays does not make the device slower: `step_s`. A stage of a pipeline cannot begin before its
    input has arrived: `hop_s` only covers a wake-up, and the rest of a hop leaves the device idle.
    """

    step_s: float = STEP_LATE_S
    hop_s: float = HOP_LATE_S


class WorkQueue:
    """The end times of work on a device (pure). Each second of work lasts `slower` seconds."""

    def __init__(self, slower: int) -> None:
        self.slower = slower
        self._free_s = float("-inf")

    def book(self, now_s: float, seconds: float, late_s: float = STEP_LATE_S) -> float:
        """Queue work of `seconds`, up to `late_s` late; return the time at which it ends."""
        idle_s = now_s - self._free_s
        start_s = now_s if idle_s > late_s * self.slower else self._free_s
        self._free_s = start_s + seconds * self.slower
        return self._free_s


class DeviceClock:
    """A device on which each thread waits, asleep, until its computation or copy has ended."""

    def __init__(
        self,
        slower: int = 1,
        lateness: Lateness | None = None,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._queue = WorkQueue(slower)
        self._lateness = lateness or Lateness()
        self._lock = threading.Lock()
        self._now = now
        self._sleep = sleep

    def run(self, seconds: float) -> float:
        """Wait until the device has run work of `seconds`, behind all earlier work; return its duration.

        Part of that duration may be in the past already (see Lateness).
        """
        return self._run(seconds, self._lateness.step_s)

    def run_stage(self, seconds: float) -> float:
        """Do as `run` for a stage of a pipeline, the input of which came over a link."""
        return self._run(seconds, self._lateness.hop_s)

    def _run(self, seconds: float, late_s: float) -> float:
        with self._lock:
            until_s = self._queue.book(self._now(), seconds, late_s)
        left_s = until_s - self._now()
        if left_s > 0:
            self._sleep(left_s)
        return seconds * self._queue.slower
