"""The plan of a cast: the part of its record that all its nodes are sent (pure)."""

from dataclasses import dataclass

from rdmacast.plan.topology import NodeTopology, is_flat
from rdmacast.protocol.pull_report import MAX_CAST_BYTES, MAX_SLOW
from rdmacast.transport import PeerAddress

NO_TIER = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class CastMember:
    """A node of a cast, with the `address` of its region server.

    `tier` is where a source holds the image. `epoch` is the epoch of the cast at which the node joined or
    rejoined, at `joined_at` (Unix seconds; 0.0: at the start of the cast). `leaf` and `domain` name its leaf
    switch and its scale-up domain, empty if unknown.
    """

    node: str
    host: str
    address: str
    tier: str = NO_TIER
    epoch: int = 0
    joined_at: float = 0.0
    leaf: str = ""
    domain: str = ""

    @property
    def peer(self) -> PeerAddress:
        return PeerAddress(url=self.address, host=self.host)


@dataclass(frozen=True, slots=True, kw_only=True)
class CastPlan:
    """One cast of `image`, the name of its region at each node, the same for all its nodes.

    Numbers of nodes are indexes of `members`. `sources` hold the image or read it from the store. Each node
    computes its own part from the planner's name. Members from `planned` on joined later and extend the plan
    at ports that it leaves free; each join increments `epoch`. Members of the `edge` have slow links, and get
    what the others have. With `in_slots` blocks leave and arrive in the order of the plan's steps, one at a
    time: for blocks that take long compared to a request. `link_bytes_s` is the measured rate of the slowest
    link of the plan, 0 if unknown.
    """

    cast_id: str
    image: str
    nbytes: int
    block_bytes: int
    planner: str
    members: tuple[CastMember, ...]
    sources: tuple[int, ...]
    planned: int
    epoch: int = 0
    edge: tuple[int, ...] = ()
    in_slots: bool = False
    link_bytes_s: int = 0

    def __post_init__(self) -> None:
        name, members = self.cast_id, len(self.members)
        if not 1 <= len(name) <= MAX_CAST_BYTES or not (name.isascii() and name.isprintable()):
            raise ValueError(f"a cast is named by 1 to {MAX_CAST_BYTES} printable ASCII characters")
        if not 0 < len(self.sources) <= self.planned <= members:
            raise ValueError(f"cast {name} has {members} members, {self.planned} planned")
        if not all(0 <= source < self.planned for source in self.sources):
            raise ValueError(f"cast {name} has a source that is not a planned member")
        if len(self.edge) > MAX_SLOW or not all(0 <= node < members for node in self.edge):
            raise ValueError(f"cast {name} has an edge of other nodes than up to {MAX_SLOW} members")
        if self.nbytes < 1 or self.block_bytes < 1:
            raise ValueError(f"cast {name} has {self.nbytes} bytes in blocks of {self.block_bytes}")
        if len({member.node for member in self.members}) != members:
            raise ValueError(f"cast {name} has a node twice")

    @property
    def blocks(self) -> int:
        return -(-self.nbytes // self.block_bytes)

    @property
    def sites(self) -> tuple[NodeTopology, ...]:
        """The topology of the members, without their rates; empty where they are alike."""
        sites = tuple(NodeTopology(leaf=one.leaf, domain=one.domain) for one in self.members)
        return () if is_flat(sites) else sites

    @property
    def targets(self) -> tuple[CastMember, ...]:
        """The members that receive the image."""
        return tuple(one for index, one in enumerate(self.members) if index not in self.sources)

    def has_target(self, node: str) -> bool:
        return any(member.node == node for member in self.targets)
