"""A node: one invoker with one accelerator, and what its tiers hold."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Tier(StrEnum):
    """Where a node holds an image, nearest first."""

    GPU = "gpu"  # accelerator memory (on a CPU node: the worker's arena)
    HOST = "host"  # shared host memory
    DISK = "disk"  # a disk of this node
    NONE = "none"


class NodeState(StrEnum):
    READY = "ready"  # takes instances
    DRAINING = "draining"  # finishes what it has and leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """One image on a node. `tiers` are all the tiers that hold the complete image; `kept` says that its
    host copy is the one that the cluster keeps."""

    image: str
    tiers: tuple[Tier, ...]
    bytes: int
    last_used_at: float
    kept: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """What a node publishes about itself with every heartbeat.

    `channel` is the address of the gateway-invoker channel and `cast` that of the region server
    (rdmacast), both `tcp://host:port`. `epoch` grows with every start of the node's process, so a
    late message of a dead process is told from one of its successor. Nodes with equal `host` share
    one host tier. `reads_store` says whether this node can read the cluster's blob store itself.
    """

    id: str
    host: str
    pid: int
    epoch: int
    state: NodeState
    device: str
    gpu_type: str
    gpu_count: int
    channel: str
    cast: str
    gpu_bytes: int
    gpu_free_bytes: int
    host_bytes: int
    host_free_bytes: int
    reads_store: bool
    allows_handlers: bool
    link_rate_bytes_s: int | None
    started_at: float
    holdings: tuple[Holding, ...] = ()
    counters: Mapping[str, int] = field(default_factory=dict)

    @property
    def gives_from_arena(self) -> bool:
        """Whether any peer can read what is in its arena alone; of a GPU's memory not all can."""
        return not self.device.startswith("cuda")
