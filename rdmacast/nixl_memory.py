"""What a reader by NIXL is told: the peer's agent, and what to read as a test (pure)."""

from dataclasses import dataclass

from rdmacast.errors import ProtocolError

NONCE_BYTES = 16
MAX_METADATA_BYTES = 16 << 10  # some hundred bytes for each network adapter


@dataclass(frozen=True, slots=True)
class ShownMemory:
    """Memory of a peer from `address` on; `metadata` is its agent's, with the key of that memory."""

    address: int
    metadata: bytes


@dataclass(frozen=True, slots=True)
class Meeting:
    """Reading NONCE_BYTES at `probe` must give `nonce`."""

    probe: ShownMemory
    nonce: bytes

    def encode(self) -> bytes:
        return self.nonce + self.probe.metadata

    @classmethod
    def decode(cls, address: int, data: bytes) -> "Meeting":
        """Raises ProtocolError."""
        if len(data) <= NONCE_BYTES:
            raise ProtocolError("an agent's metadata is missing")
        return cls(ShownMemory(address, data[NONCE_BYTES:]), data[:NONCE_BYTES])
