"""Exceptions of rdmacast.

CastError
├── PeerAuthError         the peer does not have the cluster's secret
├── ProtocolError     the peer broke the wire format or a bound
├── LinkClosed        the connection is closed; pending reads end with this
├── RegionGone        the peer does not hold (or no longer holds) the region
│   └── NotShared     the peer holds it, but not in a file or memory that this process can open
├── NoTransport       no transport can serve the pair of nodes (or not the required one)
├── DeviceError       an RDMA device or driver refused an operation
├── ChecksumError     a unit arrived damaged from every holder (names the units)
├── NoHolder          no holder is left for the missing bytes (names them)
│   └── BlocksLost    the same of a cast, after its nodes' bitfields (names the blocks too)
└── PlanError         a transfer plan breaks its law (names step, node and block)
"""


class CastError(Exception):
    """Any failure of rdmacast."""


class PeerAuthError(CastError):
    """The peer does not have the cluster's secret."""


class ProtocolError(CastError):
    """The peer broke the wire format or one of its bounds."""


class LinkClosed(CastError):
    """The connection to the peer is closed."""


class RegionGone(CastError):
    """The peer does not hold the region."""


class NotShared(RegionGone):
    """The peer holds the region, but not in a file or memory that this process can open."""


class NoTransport(CastError):
    """No transport can serve the pair of nodes."""


class DeviceError(CastError):
    """An RDMA device or its driver refused something."""


class ChecksumError(CastError):
    """A unit arrived damaged from every holder. `units` are their indexes."""

    def __init__(self, message: str, units: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.units = units


class NoHolder(CastError):
    """No node is left that holds the missing bytes; `missing` are half-open byte ranges `[start, end)`."""

    def __init__(self, message: str, missing: tuple[tuple[int, int], ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class BlocksLost(NoHolder):
    """No node of a cast can serve these `blocks` any more; blocks that arrived stay valid."""

    def __init__(
        self, message: str, blocks: tuple[int, ...] = (), missing: tuple[tuple[int, int], ...] = ()
    ) -> None:
        super().__init__(message, missing)
        self.blocks = blocks


class PlanError(CastError):
    """A transfer plan breaks its law at `step`, `node` and `block`, as far as these are known."""

    def __init__(
        self, message: str, *, step: int | None = None, node: int | None = None, block: int | None = None
    ) -> None:
        super().__init__(message)
        self.step = step
        self.node = node
        self.block = block
