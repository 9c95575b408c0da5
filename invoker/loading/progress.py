"""Progress of a load."""

from collections.abc import Callable

PROGRESS_INTERVAL_S = 0.1
LAYERS_INTERVAL_S = 0.05
_PARTS = 8  # of a load: pipelines of 2, 4 or 8 nodes can form when these are loaded

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


class LayerReports:
    """The layers of a load as they are reported: a short load has as few reports as a long one has in 0.4 s.

    New layers are reported when another eighth of all is loaded, and between these at most once per
    LAYERS_INTERVAL_S.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._reported = 0  # a bitmap
        self._next_s = 0.0

    def __call__(self, loaded: int, layers: int) -> int:
        """Return the bitmap to report, given that of the loaded ones of so many layers."""
        now_s, before = self._now_s(), self._reported
        if loaded != before and (now_s >= self._next_s or _part(loaded, layers) > _part(before, layers)):
            self._reported, self._next_s = loaded, now_s + LAYERS_INTERVAL_S
        return self._reported


def _part(bitmap: int, layers: int) -> int:
    return bitmap.bit_count() * _PARTS // max(1, layers)
