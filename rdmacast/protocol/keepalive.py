"""The timeout of a silent peer (pure)."""


class Keepalive:
    """A timer of the peer's silence: report every arrival (`on_data`), and ask `is_dead` each `interval_s`.

    A PING is sent while the peer is alive. Both ends send theirs whether or not they receive anything: an
    end that receives a payload for longer than the timeout sends nothing else meanwhile, and the sender
    cannot ping before the payload's end.
    """

    def __init__(self, interval_s: float, timeout_s: float, now_s: float) -> None:
        self.interval_s = interval_s
        self._timeout_s = timeout_s
        self._last_data_s = now_s
        self._checked_s = now_s

    def __repr__(self) -> str:
        return f"Keepalive({self._checked_s - self._last_data_s:.1f} s silent of {self._timeout_s:g})"

    def on_data(self, now_s: float) -> None:
        self._last_data_s = now_s

    def is_dead(self, now_s: float) -> bool:
        """Return whether the peer has been silent for too long."""
        # A late check means that this process was held up: the peer's signs may lie unread.
        if now_s - self._checked_s > 2 * self.interval_s:
            self._last_data_s = now_s
        self._checked_s = now_s
        return now_s - self._last_data_s >= self._timeout_s
