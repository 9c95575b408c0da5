"""How much of a payload is to be there before its reader is woken (pure)."""

MOST_BYTES = 512 << 10
_WAKE_S = 0.02  # a payload is read as often as this
_LEAST_S = 0.005  # in less time what comes tells of buffers on the way, and not of a pace


class Wakes:
    """Of one connection. To be woken for each packet takes a fast reader more time than the packet itself;
    one whose payloads come slowly hears of them as they come."""

    def __init__(self) -> None:
        self._pace_bytes_s = 0.0  # of the last payload, or of this one
        self._began_s = 0.0
        self._came = 0

    def __repr__(self) -> str:
        return f"Wakes(at {self._pace_bytes_s:.3g} B/s)"

    def begun(self, now_s: float) -> None:
        """A payload begins."""
        self._began_s, self._came = now_s, 0

    def came(self, nbytes: int, left: int, now_s: float) -> int:
        """So much of it was read, and `left` is still to come. How much to be woken for, at least 1."""
        self._came += nbytes
        lasted_s = now_s - self._began_s
        if lasted_s >= _LEAST_S:
            self._pace_bytes_s = self._came / lasted_s
        return max(1, min(left, MOST_BYTES, int(self._pace_bytes_s * _WAKE_S)))
