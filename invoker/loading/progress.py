"""Progress of a load."""

from collections.abc import Callable

PROGRESS_INTERVAL_S = 0.1

Progress = Callable[[float], None]


class ProgressThrottle:
    """A progress callback that forwards at most one report per PROGRESS_INTERVAL_S, and always the last."""

    def __init__(self, report: Progress, now_s: Callable[[], float]) -> None:
        self._report = report
        self._now_s = now_s
        self._next_s = 0.0

    def __call__(self, fraction: float) -> None:
        now_s = self._now_s()
        if fraction >= 1.0 or now_s >= self._next_s:
            self._next_s = now_s + PROGRESS_INTERVAL_S
            self._report(fraction)
