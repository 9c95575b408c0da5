"""The node's counters since the process started, published with each heartbeat."""

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Counters:
    """Counters of one node. Belongs to the event loop's thread; other threads report through their caller.

    `disk_read_bytes` are image bytes read from a store on a local disk, `store_read_bytes` those from a
    remote one. `cast_recv_bytes` were received from other nodes, by cast or pull; the counters by transport
    add up to it. `busy_us`, `loading_us` and `idle_us` are the meter's: accelerator time while instances are
    on the node.
    """

    disk_read_bytes: int = 0
    store_read_bytes: int = 0
    cast_recv_bytes: int = 0
    cast_recv_bytes_tcp: int = 0
    cast_recv_bytes_shm: int = 0
    cast_recv_bytes_verbs: int = 0
    cast_recv_bytes_cuda_ipc: int = 0
    cast_recv_bytes_nixl: int = 0
    cast_sent_bytes: int = 0
    starts_hot: int = 0
    starts_warm: int = 0
    starts_cold: int = 0
    evictions: int = 0
    busy_us: int = 0
    loading_us: int = 0
    idle_us: int = 0

    def add_received(self, transport: str, nbytes: int) -> None:
        """Count image bytes received from other nodes by a transport, if it has a counter."""
        name = f"cast_recv_bytes_{transport}"
        if hasattr(self, name):
            setattr(self, name, getattr(self, name) + nbytes)

    def snapshot(self) -> dict[str, int]:
        return asdict(self)
