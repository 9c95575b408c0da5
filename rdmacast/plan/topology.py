"""The topology of the nodes in the network, as planners use it (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTopology:
    """The topology of one node: its leaf switch, its scale-up domain (NVLink, for example), its port's rate.

    Leaf and domain are names, empty where unknown: a node without a domain is in none with others.
    """

    leaf: str = ""
    domain: str = ""
    bytes_per_s: float = 1.0

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0:
            raise ValueError(f"a port's rate must be above 0, not {self.bytes_per_s}")


@dataclass(frozen=True, slots=True)
class Unit:
    """Nodes of one scale-up domain that act as one: all have a block a step after one of them."""

    nodes: tuple[int, ...]
    leaf: str
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
    numbers: dict[str, int] = {}
    return [
        len(sites) + numbers.setdefault(site.domain, len(numbers)) if site.domain else node
        for node, site in enumerate(sites)
    ]


def leaves_of(sites: Sequence[NodeTopology]) -> int:
    """Return the number of leaf switches."""
    return len({site.leaf for site in sites})


def is_flat(sites: Sequence[NodeTopology]) -> bool:
    """Return whether all nodes are under one leaf switch, and no two in one scale-up domain."""
    return leaves_of(sites) <= 1 and len(set(domains_of(sites))) == len(sites)


def without_rates(sites: Sequence[NodeTopology]) -> tuple[NodeTopology, ...]:
    """Return the topology of the nodes as if their ports had one rate."""
    return tuple(replace(site, bytes_per_s=1.0) for site in sites)


def near_of(node: int, others: Sequence[int], sites: Sequence[NodeTopology]) -> list[int]:
    """Return the others under the node's leaf switch; all of them if there are none, or it is unknown."""
    if not sites:
        return list(others)
    return [other for other in others if sites[other].leaf == sites[node].leaf] or list(others)
