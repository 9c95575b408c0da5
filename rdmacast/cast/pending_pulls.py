"""The pulls of a node that have not ended (pure)."""

from collections.abc import Callable
from dataclasses import dataclass

from rdmacast.cast.session_actions import Action, DropPull, StartPull


@dataclass(slots=True)
class PendingPull:
    """A pull that has not ended.

    `held_s` is the time since which the source is known to hold the block, `started_s` that of the first
    byte.
    """

    pull: StartPull
    held_s: float | None = None
    started_s: float | None = None
    dropped: bool = False

    @property
    def is_pending(self) -> bool:
        """Whether the block is expected: the pull was not dropped and its source holds the block."""
        return not self.dropped and self.held_s is not None

    @property
    def has_started(self) -> bool:
        """Whether the first bytes of the block have arrived."""
        return self.started_s is not None

    @property
    def since_s(self) -> float | None:
        """The time since which the block could arrive, if it can."""
        return self.held_s if self.started_s is None else self.started_s


class PendingPulls(dict[int, PendingPull]):
    """Pulls by number; a dropped one stays until its read has ended, since that may still write."""

    @property
    def pending(self) -> int:
        """Blocks, as bits, that are expected: their sources hold them."""
        bits = 0
        for pending in self.values():
            if pending.held_s is not None and not pending.dropped:
                bits |= 1 << pending.pull.block
        return bits

    @property
    def busy(self) -> int:
        """Blocks, as bits, that a read may write into."""
        bits = 0
        for pending in self.values():
            bits |= 1 << pending.pull.block
        return bits

    def counts(self) -> tuple[int, int]:
        """Return the number of pulls that are not dropped, and how many of them are expected."""
        left = expected = 0
        for pending in self.values():
            if not pending.dropped:
                left += 1
                expected += pending.held_s is not None
        return left, expected

    def drop(self, matches: Callable[[PendingPull], bool], reason: str) -> list[Action]:
        """Mark the matching pulls as dropped and return the actions that end their reads."""
        dropped: list[Action] = []
        for number, pending in self.items():
            if not pending.dropped and matches(pending):
                pending.dropped = True
                dropped.append(DropPull(number, reason))
        return dropped

    def drop_waiting(self, matches: Callable[[StartPull], bool], reason: str) -> list[Action]:
        """Drop matching pulls of blocks that are not known to be at their sources."""
        return self.drop(lambda pending: pending.held_s is None and matches(pending.pull), reason)

    def drop_all(self, reason: str) -> list[Action]:
        """Drop every pull."""
        return self.drop(lambda _: True, reason)
