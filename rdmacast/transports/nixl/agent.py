"""The seam to NIXL: agents that read each other's memory."""

from typing import Protocol


class NixlTransfer(Protocol):
    """A read under way."""

    def has_ended(self) -> bool:
        """Makes progress, too. Raises DeviceError where it failed: nothing is known of its bytes then."""
        ...


class NixlAgent(Protocol):
    """All methods belong to one thread at a time, and raise DeviceError."""

    def register(self, address: int, nbytes: int) -> bytes:
        """Let the agent use host memory; returns what a peer needs to read it (at most
        MAX_METADATA_BYTES)."""
        ...

    def deregister(self, address: int, nbytes: int) -> None: ...

    def add_peer(self, metadata: bytes) -> str:
        """Know a peer, or more of its memory; returns its name."""
        ...

    def remove_peer(self, name: str) -> None: ...

    def read(self, peer: str, target: int, source: int, nbytes: int) -> NixlTransfer:
        """Begin to read the peer's `source` into our `target`; both registered."""
        ...

    def progress(self) -> None:
        """Take part in reads of this agent's memory, as some networks need."""
        ...

    def close(self) -> None:
        """On return nothing is read or written any more. Idempotent."""
        ...


class NixlDriver(Protocol):
    """Makes agents."""

    def agent(self) -> NixlAgent:
        """Raises DeviceError."""
        ...
