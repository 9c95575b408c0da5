"""When to give up a silent peer (pure)."""


class Keepalive:
    """Give it every arrival (`heard`); each `interval_s` ask `is_dead`, and send a PING if it is not.

    Both ends send theirs whether or not they hear the other: who receives a payload for longer than
    the timeout says nothing else meanwhile, and the sender cannot ask before the payload's end.
    """

    def __init__(self, interval_s: float, timeout_s: float, now_s: float) -> None:
        self.interval_s = interval_s
        self._timeout_s = timeout_s
        self._heard_s = now_s
        self._checked_s = now_s

    def __repr__(self) -> str:
        return f"Keepalive({self._checked_s - self._heard_s:.1f} s silent of {self._timeout_s:g})"

    def heard(self, now_s: float) -> None:
        self._heard_s = now_s

    def is_dead(self, now_s: float) -> bool:
        """Whether the peer has been silent for too long."""
        # A late check means that this process was held up: the peer's signs may lie unread.
        if now_s - self._checked_s > 2 * self.interval_s:
            self._heard_s = now_s
        self._checked_s = now_s
        return now_s - self._heard_s >= self._timeout_s
