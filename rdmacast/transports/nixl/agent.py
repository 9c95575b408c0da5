"""The seam to NIXL: agents that read each other's memory."""

from typing import Protocol


class NixlTransfer(Protocol):
    """A read under way."""

    def has_ended(self) -> bool:
        """Make progress, and return whether the read has ended.

        Raises DeviceError if it failed: its bytes are then undefined.
        """
        ...


class NixlAgent(Protocol):
    """All methods belong to one thread at a time, and raise DeviceError."""

    def register(self, address: int, nbytes: int) -> bytes:
        """Register host memory; returns the metadata for peers (at most MAX_METADATA_BYTES)."""
        ...

    def deregister(self, address: int, nbytes: int) -> None: ...

    def add_peer(self, metadata: bytes) -> str:
        """Load the metadata of a peer or of more of its memory; returns the peer's name."""
        ...

    def remove_peer(self, name: str) -> None: ...

    def read(self, peer: str, target: int, source: int, nbytes: int) -> NixlTransfer:
        """Begin to read the peer's `source` into our `target`; both must be registered."""
        ...

    def progress(self) -> None:
        """Serve reads of this agent's memory, which some networks need."""
        ...

    def close(self) -> None:
        """Close the agent; on return nothing is read or written any more. Idempotent."""
        ...


class NixlDriver(Protocol):
    """A factory of agents."""

    def agent(self) -> NixlAgent:
        """Make an agent. Raises DeviceError."""
        ...
