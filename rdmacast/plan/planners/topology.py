"""The topology of the nodes in the network, as planners use it (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTopology:
    """The topology of one node: its leaf switch, its scale-up domain (NVLink, for example), its port's rate.

    A node that `serves_prefill` sends KV caches, so that being a source would slow its requests.
    """

    leaf: int = 0
    domain: int | None = None
    bytes_per_s: float = 1.0
    serves_prefill: bool = False

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0:
            raise ValueError(f"a port's rate must be above 0, not {self.bytes_per_s}")


@dataclass(frozen=True, slots=True)
class Unit:
    """Nodes of one scale-up domain that act as one: all have a block a step after one of them."""

    nodes: tuple[int, ...]
    leaf: int
    bytes_per_s: float


def units_of(nodes: Sequence[int], sites: Sequence[NodeTopology]) -> list[Unit]:
    """Return the nodes by scale-up domain; a node without a domain is a unit by itself."""
    numbers = domains_of(sites)
    members: dict[int, list[int]] = {}
    for node in nodes:
        members.setdefault(numbers[node], []).append(node)
    return [
        Unit(tuple(together), sites[together[0]].leaf, sum(sites[node].bytes_per_s for node in together))
        for together in members.values()
    ]


def domains_of(sites: Sequence[NodeTopology]) -> list[int]:
    """Return a number for each node, which it shares only with the nodes of its scale-up domain."""
    numbers: dict[int, int] = {}
    return [
        len(sites) + numbers.setdefault(site.domain, len(numbers)) if site.domain is not None else node
        for node, site in enumerate(sites)
    ]
