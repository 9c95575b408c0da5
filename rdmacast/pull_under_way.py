"""A pull that has not ended, and all of a node's that have not (pure)."""

from collections.abc import Callable
from dataclasses import dataclass

from rdmacast.session_actions import Action, Drop, Pull


@dataclass(slots=True)
class PullUnderWay:
    """`held_s`: since when the source is known to hold the block; `began`: what our port had given to each of
    the pulls that shared it when this one began."""

    pull: Pull
    held_s: float | None = None
    began_s: float | None = None
    began: float = 0.0
    dropped: bool = False

    @property
    def is_coming(self) -> bool:
        return not self.dropped and self.held_s is not None

    @property
    def has_begun(self) -> bool:
        """Its bytes come."""
        return self.began_s is not None


class PullsUnderWay(dict[int, PullUnderWay]):
    """By number. A dropped one stays until its read has ended: until then it may write."""

    @property
    def coming(self) -> int:
        """Blocks, as bits, that come: their sources hold them."""
        bits = 0
        for one in self.values():
            if one.held_s is not None and not one.dropped:
                bits |= 1 << one.pull.block
        return bits

    @property
    def busy(self) -> int:
        """Blocks, as bits, that a read may write into."""
        bits = 0
        for one in self.values():
            bits |= 1 << one.pull.block
        return bits

    def counts(self) -> tuple[int, int]:
        """How many are not dropped, and how many of these come."""
        left = coming = 0
        for one in self.values():
            if not one.dropped:
                left += 1
                coming += one.held_s is not None
        return left, coming

    def drop(self, which: Callable[[PullUnderWay], bool], reason: str) -> list[Action]:
        dropped: list[Action] = []
        for number, one in self.items():
            if not one.dropped and which(one):
                one.dropped = True
                dropped.append(Drop(number, reason))
        return dropped

    def drop_waiting(self, which: Callable[[Pull], bool], reason: str) -> list[Action]:
        """End pulls for blocks that are not known to be at their sources."""
        return self.drop(lambda one: one.held_s is None and which(one.pull), reason)

    def drop_all(self, reason: str) -> list[Action]:
        return self.drop(lambda _: True, reason)
