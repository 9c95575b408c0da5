"""The durations of a node's latest pulls, for reports to the straggler detector (pure)."""

from collections import deque
from collections.abc import Collection

from rdmacast.protocol.pull_report import MAX_ENDED, MAX_OPEN, PullReport, TimedPull


class PullLog:
    """The pull log of one node in one cast, in which a block should take `block_s` (0 if unknown).

    Times are of any monotonic clock.
    """

    def __init__(self, cast: str, node: int, block_s: float = 0.0) -> None:
        self._cast = cast
        self._node = node
        self._block_us = int(block_s * 1e6)
        self._open: dict[int, tuple[int, float]] = {}  # by the pull's number: source, since when
        self._ended: deque[TimedPull] = deque(maxlen=MAX_ENDED)  # since the last report
        self._zero_s: float | None = None

    def __repr__(self) -> str:
        return f"PullLog({len(self._open)} under way, {len(self._ended)} untold)"

    def on_started(self, number: int, source: int, now_s: float) -> None:
        if self._zero_s is None:
            self._zero_s = now_s
        self._open.setdefault(number, (source, now_s))

    def on_ended(self, number: int, now_s: float, *, arrived: bool) -> None:
        """Record the end of a pull; one that failed or was dropped is not reported."""
        source, started_s = self._open.pop(number, (0, None))
        if arrived and started_s is not None:
            self._ended.append(self._timed(source, started_s, now_s))

    def report(self, plan: int, slow: Collection[int], now_s: float) -> PullReport:
        """Return what was not reported yet, under the plan of that number around the slow nodes."""
        ended = tuple(self._ended)
        self._ended.clear()
        return PullReport(
            cast=self._cast,
            node=self._node,
            plan=plan,
            slow=tuple(sorted(slow)),
            block_us=self._block_us,
            clock_us=self._us(now_s),
            ended=ended,
            pending=tuple(
                self._timed(source, started_s, now_s)
                for source, started_s in list(self._open.values())[:MAX_OPEN]
            ),
        )

    def _timed(self, source: int, started_s: float, ended_s: float) -> TimedPull:
        started_us = self._us(started_s)
        return TimedPull(source=source, started_us=started_us, duration_us=self._us(ended_s) - started_us)

    def _us(self, now_s: float) -> int:
        return int((now_s - (now_s if self._zero_s is None else self._zero_s)) * 1e6)
