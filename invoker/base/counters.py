"""The node's counters since the process started, published with each heartbeat."""

from dataclasses import asdict, dataclass, field

from rdmacast.transports.choose import BEST_FIRST


@dataclass(slots=True)
class Counters:
    """Counters of one node. Belongs to the event loop's thread; other threads report through their caller.

    `disk_read_bytes` are image bytes read from a store on a local disk, `store_read_bytes` those from a
    remote one, `disk_cache_read_bytes` those from the disk tier. `cast_recv_bytes` were received from other
    nodes, by cast or pull; `received`, the bytes by transport, adds up to it. `busy_us`, `loading_us` and
    `idle_us` are the meter's: accelerator time while instances are on the node. `rdma_quarantined_bytes` are
    memory that a device refused to release. `images_verified` matched their SHA-256 as a whole,
    `images_rejected` did not.
    """

    disk_read_bytes: int = 0
    store_read_bytes: int = 0
    disk_cache_read_bytes: int = 0
    cast_recv_bytes: int = 0
    cast_sent_bytes: int = 0
    starts_hot: int = 0
    starts_warm: int = 0
    starts_cold: int = 0
    evictions: int = 0
    rdma_quarantined_bytes: int = 0
    images_verified: int = 0
    images_rejected: int = 0
    busy_us: int = 0
    loading_us: int = 0
    idle_us: int = 0
    received: dict[str, int] = field(default_factory=lambda: dict.fromkeys(BEST_FIRST, 0))

    def add_received(self, transport: str, nbytes: int) -> None:
        """Count image bytes received from other nodes by a transport."""
        self.received[transport] = self.received.get(transport, 0) + nbytes

    def snapshot(self) -> dict[str, int]:
        """Return all counters by name."""
        counts = asdict(self)
        received = {f"cast_recv_bytes_{name}": nbytes for name, nbytes in counts.pop("received").items()}
        return counts | received
