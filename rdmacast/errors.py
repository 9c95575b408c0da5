"""Exceptions of rdmacast.

CastError
├── PeerAuthError         the peer does not have the cluster's secret
├── ProtocolError     the peer broke the wire format or a bound
├── LinkClosed        the connection is closed; pending reads end with this
│   └── PeerUnreachable   no connection could be opened
├── RegionGone        the peer does not hold (or no longer holds) the region
│   └── NotShared     the peer holds it, but not in a file or memory that this process can open
├── NoTransport       no transport can serve the pair of nodes (or not the required one)
├── DeviceError       an RDMA device or driver refused an operation
├── BlocksLost        no node of a cast can serve the missing blocks (names them)
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


class PeerUnreachable(LinkClosed):
    """No connection to the peer could be opened."""


class RegionGone(CastError):
    """The peer does not hold the region."""


class NotShared(RegionGone):
    """The peer holds the region, but not in a file or memory that this process can open."""


class NoTransport(CastError):
    """No transport can serve the pair of nodes."""


class DeviceError(CastError):
    """An RDMA device or its driver refused something."""


class BlocksLost(CastError):
    """No node of a cast can serve these `blocks` any more; blocks that arrived stay valid.

    `missing` are the half-open byte ranges `[start, end)` of the blocks.
    """

    def __init__(
        self, message: str, blocks: tuple[int, ...] = (), missing: tuple[tuple[int, int], ...] = ()
    ) -> None:
        super().__init__(message)
        self.blocks = blocks
        self.missing = missing


class PlanError(CastError):
    """A transfer plan breaks its law at `step`, `node` and `block`, as far as these are known."""

    def __init__(
        self, message: str, *, step: int | None = None, node: int | None = None, block: int | None = None
    ) -> None:
        super().__init__(message)
        self.step = step
        self.node = node
        self.block = block
