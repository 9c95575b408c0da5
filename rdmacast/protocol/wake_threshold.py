"""The number of received bytes at which the reader of a payload is woken (pure)."""

MAX_WAKE_BYTES = 512 << 10
_WAKE_S = 0.02  # a payload is read as often as this
_MIN_SAMPLE_S = 0.005  # in less time arrivals show buffers on the path, and not a rate


class WakeThreshold:
    """The wake threshold of one connection.

    Waking for each packet costs a fast reader more time than the packet itself; a reader of slow payloads
    is woken for each arrival.
    """

    def __init__(self) -> None:
        self._rate_bytes_per_s = 0.0  # of the last payload, or of this one
        self._started_s = 0.0
        self._received_bytes = 0

    def __repr__(self) -> str:
        return f"WakeThreshold(at {self._rate_bytes_per_s:.3g} B/s)"

    def on_payload(self, now_s: float) -> None:
        """Start measuring a payload."""
        self._started_s, self._received_bytes = now_s, 0

    def on_data(self, nbytes: int, left: int, now_s: float) -> int:
        """Count `nbytes` read, with `left` to come; returns the bytes to be woken for, at least 1."""
        self._received_bytes += nbytes
        lasted_s = now_s - self._started_s
        if lasted_s >= _MIN_SAMPLE_S:
            self._rate_bytes_per_s = self._received_bytes / lasted_s
        return max(1, min(left, MAX_WAKE_BYTES, int(self._rate_bytes_per_s * _WAKE_S)))
