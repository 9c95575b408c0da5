"""A pull that has not ended (pure)."""

from dataclasses import dataclass

from rdmacast.session_actions import Pull


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
