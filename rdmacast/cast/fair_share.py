"""The time that each of several users had of a resource which they share equally (pure)."""


class FairShareClock:
    """A clock that runs 1/n as fast while n users share the resource."""

    def __init__(self) -> None:
        self._sharing = 0
        self._share_s = 0.0
        self._at_s = 0.0

    def __repr__(self) -> str:
        return f"FairShareClock({self._sharing} sharing, {self._share_s:.3g} s each)"

    def join(self, now_s: float) -> float:
        """Add a user; returns the clock in seconds, from which the user's share is counted."""
        self._advance(now_s)
        self._sharing += 1
        return self._share_s

    def leave(self, now_s: float) -> float:
        """Remove a user; returns the clock in seconds."""
        self._advance(now_s)
        self._sharing -= 1
        return self._share_s

    def when_reached_s(self, share_s: float) -> float:
        """Return when the clock will read `share_s` if no user joins or leaves."""
        return self._at_s + (share_s - self._share_s) * max(1, self._sharing)

    def _advance(self, now_s: float) -> None:
        if self._sharing and now_s > self._at_s:
            self._share_s += (now_s - self._at_s) / self._sharing
        self._at_s = max(self._at_s, now_s)
