"""Limits of one node's part in a cast, fixed when it begins."""

from dataclasses import dataclass, replace

SLOW = 2.0  # a pull that takes more than so many times the usual: under half of the median rate


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """`pull_timeout_s` bounds one pull, `ask_timeout_s` the answer of a peer that was asked what it holds,
    and `patience_s` how long a node without any pull waits for what its planned sources do not get (less
    at first where pulls are quick).
    No pull that took less than `least_slow_s` counts as slow: among quick ones the processor's turns show.

    A peer is lost after `max_failures` failed pulls in a row or `max_asks` unanswered questions, and
    is not asked again for a block of which `max_tries` pulls ended badly.
    """

    window: int = 3
    pull_timeout_s: float = 30.0
    ask_timeout_s: float = 2.0
    patience_s: float = 2.0
    least_slow_s: float = 0.05
    max_tries: int = 3
    max_failures: int = 5
    max_asks: int = 4

    def __post_init__(self) -> None:
        if min(self.window, self.max_tries, self.max_failures, self.max_asks) < 1:
            raise ValueError("window and limits of a session must be 1 or more")
        if not min(self.pull_timeout_s, self.ask_timeout_s, self.patience_s) > 0:
            raise ValueError("the timeouts of a session must be above 0")

    def for_links(self, block_s: float) -> "SessionSettings":
        """Where a block takes a link so long: one that came quicker, out of a buffer, makes no other slow."""
        return replace(self, least_slow_s=max(self.least_slow_s, SLOW * block_s))
