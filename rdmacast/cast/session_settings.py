"""Limits of one node's part in a cast, fixed at its start."""

from dataclasses import dataclass, replace

SILENCE_FACTOR = 8.0  # times the longest pull: so long a node may send no block


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """Limits of a session, in seconds and counts.

    `pull_timeout_s` bounds one pull, `ask_timeout_s` the reply to a HAVE request, and `patience_s` the time
    that a node without any pull waits for blocks of its planned sources (less at first where pulls are
    fast). No node is left for its silence before `min_silence_s`.

    A peer is lost after `max_failures` failed pulls in a row or `max_asks` requests without a reply, and a
    block is not pulled from it again after `max_tries` failed pulls.
    """

    window: int = 3
    pull_timeout_s: float = 30.0
    ask_timeout_s: float = 2.0
    patience_s: float = 2.0
    min_silence_s: float = 0.25
    max_tries: int = 3
    max_failures: int = 5
    max_asks: int = 4

    def __post_init__(self) -> None:
        if min(self.window, self.max_tries, self.max_failures, self.max_asks) < 1:
            raise ValueError("window and limits of a session must be 1 or more")
        if not min(self.pull_timeout_s, self.ask_timeout_s, self.patience_s) > 0:
            raise ValueError("the timeouts of a session must be above 0")

    def for_links(self, block_s: float) -> "SessionSettings":
        """Return the settings for links that take `block_s` for a block.

        Blocks that came faster, out of a buffer, make no node silent.
        """
        return replace(self, min_silence_s=max(self.min_silence_s, SILENCE_FACTOR * block_s))
