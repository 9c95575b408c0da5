"""How many nodes the platform has, lacks and could give back, by pool."""

from dataclasses import dataclass
from typing import NamedTuple


class NodePool(NamedTuple):
    """Nodes that are alike for who adds them: with so many GPUs (0: a CPU), and for handlers or not."""

    gpus: int
    handlers: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDemand:
    """The nodes of a pool that are there, how many more are needed, and how many are idle and not needed."""

    pool: NodePool
    nodes: int
    lacking: int = 0
    spare: int = 0

    @property
    def wanted(self) -> int:
        """The number of nodes that the pool should have."""
        return self.nodes + self.lacking - self.spare
