"""What a node's latest pulls took, as it tells those who look for slow nodes (pure)."""

from collections import deque
from collections.abc import Collection

from rdmacast.pull_report import MOST_ENDED, MOST_OPEN, PullReport, TimedPull


class PullLog:
    """Of one node in one cast, of which a block should take `block_s`; 0 where nobody knows. Times are
    those of any clock that never goes back."""

    def __init__(self, cast: str, node: int, block_s: float = 0.0) -> None:
        self._cast = cast
        self._node = node
        self._block_us = int(block_s * 1e6)
        self._open: dict[int, tuple[int, float]] = {}  # by the pull's number: source, since when
        self._ended: deque[TimedPull] = deque(maxlen=MOST_ENDED)  # since the last report
        self._zero_s: float | None = None

    def __repr__(self) -> str:
        return f"PullLog({len(self._open)} under way, {len(self._ended)} untold)"

    def began(self, number: int, source: int, now_s: float) -> None:
        if self._zero_s is None:
            self._zero_s = now_s
        self._open.setdefault(number, (source, now_s))

    def ended(self, number: int, now_s: float, *, came: bool) -> None:
        """What broke off, or was dropped, tells nothing of how fast its nodes are."""
        source, began_s = self._open.pop(number, (0, None))
        if came and began_s is not None:
            self._ended.append(self._timed(source, began_s, now_s))

    def report(self, plan: int, slow: Collection[int], now_s: float) -> PullReport:
        """What was not told yet; by the plan so numbered, around the nodes that it leaves at the edge."""
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
            under_way=tuple(
                self._timed(source, began_s, now_s)
                for source, began_s in list(self._open.values())[:MOST_OPEN]
            ),
        )

    def _timed(self, source: int, began_s: float, ended_s: float) -> TimedPull:
        began_us = self._us(began_s)
        return TimedPull(source=source, began_us=began_us, lasted_us=self._us(ended_s) - began_us)

    def _us(self, now_s: float) -> int:
        return int((now_s - (now_s if self._zero_s is None else self._zero_s)) * 1e6)
