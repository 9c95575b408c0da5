"""The node's counters: plain sums since the process started, published with every heartbeat."""

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Counters:
    """Owned by the event loop's thread; other threads report through their caller.

    `disk_read_bytes` are image bytes read from a store on a local disk, `store_read_bytes` those from
    a remote one. `busy_us`, `loading_us` and `idle_us` are the meter's: the accelerator's time while
    instances are on the node.
    """

    disk_read_bytes: int = 0
    store_read_bytes: int = 0
    cast_recv_bytes: int = 0
    cast_sent_bytes: int = 0
    starts_hot: int = 0
    starts_warm: int = 0
    starts_cold: int = 0
    evictions: int = 0
    busy_us: int = 0
    loading_us: int = 0
    idle_us: int = 0

    def snapshot(self) -> dict[str, int]:
        return asdict(self)
