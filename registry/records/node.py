"""A node: one invoker with one accelerator or more, and the images in its tiers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from registry.records.engine import EngineKind
from registry.records.fence import NO_FENCE, Fence


class Tier(StrEnum):
    """Where a node holds an image, nearest first."""

    GPU = "gpu"  # accelerator memory (on a CPU node: the worker's arena)
    HOST = "host"  # shared host memory
    DISK = "disk"  # a disk of this node
    NONE = "none"


class NodeState(StrEnum):
    """The state of a node."""

    READY = "ready"  # takes instances
    DRAINING = "draining"  # finishes its requests and exits


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedImage:
    """An image cached on a node.

    `tiers` are all the tiers that hold the complete image; `pinned`: its host copy is one that the cluster
    keeps, evicted after all others. `settled`: the node does not need the host copy any more, to check the
    image or to write it to the disk.
    """

    image: str
    tiers: tuple[Tier, ...]
    bytes: int
    last_used_at: float
    pinned: bool = False
    settled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """The record that a node publishes with every heartbeat.

    `channel` is the address of the gateway-invoker channel and `cast` that of the region server
    (rdmacast), both `tcp://host:port`. `epoch` grows with every start of the node's process, which
    distinguishes late messages of a dead process. Nodes with equal `host` share one host tier.
    `gpu_count` accelerators belong to each instance on the node (an emulated device counts as one).
    `gpu_largest_free_bytes` is the largest free range of the arena, `gpu_largest_room_bytes` the same if
    images without an instance were evicted (None: not reported).
    `reads_store`: this node can read the cluster's blob store itself. `link_rate_bytes_s` is the configured
    cap on its transfers, `port_rate_bytes_s` the speed of its network port, None if unknown. `controller` is
    the greatest fence among the controllers that started instances here. `engines` can run models here.
    `leaf` names the leaf switch of its network port, `domain` the scale-up domain (NVLink, for example) in
    which its accelerator is; empty if unknown. A `cordoned` node starts no further instances.
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
    port_rate_bytes_s: int | None = None
    gpu_largest_free_bytes: int | None = None
    gpu_largest_room_bytes: int | None = None
    controller: Fence = NO_FENCE
    engines: tuple[EngineKind, ...] = (EngineKind.NATIVE,)
    leaf: str = ""
    domain: str = ""
    cordoned: bool = False
    holdings: tuple[CachedImage, ...] = ()
    counters: Mapping[str, int] = field(default_factory=dict)
