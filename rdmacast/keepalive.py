"""When to ask a silent peer for a sign of life, and when to give it up (pure)."""

from enum import Enum, auto


class Verdict(Enum):
    QUIET = auto()  # heard from it lately
    PING = auto()  # ask it
    DEAD = auto()  # it did not answer in time


class Keepalive:
    """Give it every arrival (`heard`) and call `check` each `interval_s`."""

    def __init__(self, interval_s: float, timeout_s: float, now_s: float) -> None:
        self.interval_s = interval_s
        self._timeout_s = timeout_s
        self._heard_s = now_s
        self._checked_s = now_s

    def __repr__(self) -> str:
        return f"Keepalive({self._checked_s - self._heard_s:.1f} s silent of {self._timeout_s:g})"

    def heard(self, now_s: float) -> None:
        self._heard_s = now_s

    def check(self, now_s: float) -> Verdict:
        # A late check means that this process was held up: the peer's signs may lie unread.
        if now_s - self._checked_s > 2 * self.interval_s:
            self._heard_s = now_s
        self._checked_s = now_s
        silent_s = now_s - self._heard_s
        if silent_s >= self._timeout_s:
            return Verdict.DEAD
        return Verdict.PING if silent_s >= self.interval_s / 2 else Verdict.QUIET
