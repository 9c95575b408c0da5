"""What each of several things under way at once had of something that they share equally (pure)."""


class Shares:
    """A clock that runs the slower the more there are: while n share a port, each has a nth of its time."""

    def __init__(self) -> None:
        self._sharing = 0
        self._share_s = 0.0
        self._at_s = 0.0

    def __repr__(self) -> str:
        return f"Shares({self._sharing} sharing, {self._share_s:.3g} s each)"

    def entered(self, now_s: float) -> float:
        """One more shares. What each had until now, in seconds: what it has had then is above that."""
        self._advance(now_s)
        self._sharing += 1
        return self._share_s

    def left(self, now_s: float) -> float:
        """One shares no more."""
        self._advance(now_s)
        self._sharing -= 1
        return self._share_s

    def reached_s(self, share_s: float) -> float:
        """When each will have had `share_s`, if nothing changes."""
        return self._at_s + (share_s - self._share_s) * max(1, self._sharing)

    def _advance(self, now_s: float) -> None:
        if self._sharing and now_s > self._at_s:
            self._share_s += (now_s - self._at_s) / self._sharing
        self._at_s = max(self._at_s, now_s)
