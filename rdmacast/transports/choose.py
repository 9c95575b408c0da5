"""The choice of the transport for a pair of nodes, best first, with the reason (pure)."""

from collections.abc import Collection, Mapping

from rdmacast.errors import NoTransport
from rdmacast.transport import PeerAddress, TransportChoice

# Host memory before the GPU's: it is read in one copy, too, and takes no GPU time.
_OF_ONE_HOST = ("shm", "cuda_ipc")
BEST_FIRST = (*_OF_ONE_HOST, "verbs", "nixl", "tcp")


def choose(
    local_host: str,
    peer: PeerAddress,
    available: Collection[str],
    require: str | None = None,
    absent: Mapping[str, str] | None = None,
) -> TransportChoice:
    """Choose from `available`; with `require` that transport or none. Raises NoTransport.

    `absent` has the reasons why others are not available, which are reported where one of them would have
    been better.
    """
    absent = absent or {}
    same_host = bool(local_host) and peer.host == local_host
    if require is not None:
        if require not in available:
            why = absent.get(require, "not available")
            raise NoTransport(f"{require} is required for {peer.url}, but: {why}")
        if require in _OF_ONE_HOST and not same_host:
            raise NoTransport(
                f"{require} is required, but {peer.url} is on host {peer.host!r}, not {local_host!r}"
            )
        return TransportChoice(transport=require, reason="required")
    where = f"same host {local_host!r}" if same_host else f"host {peer.host!r} is not {local_host!r}"
    passed_over: list[str] = []
    for transport in BEST_FIRST:
        if transport in _OF_ONE_HOST and not same_host:
            continue
        if transport in available:
            return TransportChoice(transport=transport, reason="; ".join([where, *passed_over]))
        name = "shared memory" if transport == "shm" else transport
        if transport in absent:
            passed_over.append(f"no {name}: {absent[transport]}")
        elif transport == "shm":
            passed_over.append("no shared memory")
    reached = f"none of {', '.join(sorted(available)) or 'no transports'} reaches {peer.url}"
    raise NoTransport("; ".join([reached, *passed_over]))
