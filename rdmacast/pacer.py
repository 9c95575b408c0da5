"""A rate limit over all transfers of a node: a token bucket with a queue (pure)."""


class Pacer:
    """A token bucket that returns how long to wait before the next piece.

    Reservations are served in order. Links that reserve one piece of at most `piece_bytes` at a time, and
    the next one only after it, share the rate equally. Within any `t` seconds at most `rate·t + burst +
    piece` bytes pass.
    """

    def __init__(self, rate_bytes_s: float, burst_bytes: int | None = None) -> None:
        if rate_bytes_s <= 0:
            raise ValueError(f"a link rate must be above 0, not {rate_bytes_s}")
        # 10 ms of the rate: fine enough for fairness, coarse enough for a timer.
        self._piece_bytes = int(max(1024, min(256 * 1024, rate_bytes_s * 0.010)))
        burst = 2 * self._piece_bytes if burst_bytes is None else burst_bytes
        self._rate_bytes_s = rate_bytes_s
        self._burst_s = burst / rate_bytes_s
        self._free_s = float("-inf")  # when all that was reserved so far will have passed

    def __repr__(self) -> str:
        return f"Pacer({self._rate_bytes_s:.0f} B/s)"

    @property
    def piece_bytes(self) -> int:
        return self._piece_bytes

    def reserve(self, now_s: float, nbytes: int) -> float:
        """Reserve `nbytes` of the rate; returns the seconds to wait before moving them."""
        self._free_s = max(self._free_s, now_s - self._burst_s)
        wait_s = max(0.0, self._free_s - now_s)
        self._free_s += nbytes / self._rate_bytes_s
        return wait_s
