"""Which transport serves a pair of nodes, best first, and why (pure)."""

from collections.abc import Collection

from rdmacast.errors import NoTransport
from rdmacast.transport import Choice, PeerAddress


def choose(
    local_host: str, peer: PeerAddress, available: Collection[str], require: str | None = None
) -> Choice:
    """Pick from `available`; with `require` that one or nothing. Raises NoTransport."""
    same_host = bool(local_host) and peer.host == local_host
    if require is not None:
        if require not in available:
            raise NoTransport(f"{require} is required for {peer.url} but not available")
        if require == "shm" and not same_host:
            raise NoTransport(f"shm is required, but {peer.url} is on host {peer.host!r}, not {local_host!r}")
        return Choice(transport=require, reason="required")
    if same_host and "shm" in available:
        return Choice(transport="shm", reason=f"same host {local_host!r}")
    if "tcp" in available:
        if not same_host:
            return Choice(transport="tcp", reason=f"host {peer.host!r} is not {local_host!r}")
        return Choice(transport="tcp", reason=f"same host {local_host!r}, but no shared memory")
    raise NoTransport(f"none of {', '.join(sorted(available)) or 'no transports'} reaches {peer.url}")
