"""Payloads of the NIXL transport: an agent's metadata, memory addresses, and a test read (pure)."""

import struct
from dataclasses import dataclass

from rdmacast.errors import ProtocolError

NONCE_BYTES = 16
MAX_METADATA_BYTES = 16 << 10  # some hundred bytes for each network adapter
MAX_ADDRESS = 1 << 62

_ADDRESS = struct.Struct(">Q")


@dataclass(frozen=True, slots=True)
class NixlMemory:
    """Memory of a peer from `address` on; `metadata` is its agent's, with the key of that memory."""

    address: int
    metadata: bytes

    def encode(self) -> bytes:
        """Return the address and the metadata."""
        return _ADDRESS.pack(self.address) + self.metadata

    @classmethod
    def decode(cls, data: bytes) -> "NixlMemory":
        """Read an address and metadata of 1 to MAX_METADATA_BYTES. Raises ProtocolError."""
        if not 1 <= len(data) - _ADDRESS.size <= MAX_METADATA_BYTES:
            raise ProtocolError(f"an agent's metadata is missing or too long: {len(data)} bytes")
        (address,) = _ADDRESS.unpack_from(data)
        if address > MAX_ADDRESS:
            raise ProtocolError(f"an agent's address {address} is out of bounds")
        return cls(address, data[_ADDRESS.size :])


@dataclass(frozen=True, slots=True)
class NixlProbe:
    """A test of the path to an agent: reading NONCE_BYTES of `memory` must yield `nonce`."""

    memory: NixlMemory
    nonce: bytes

    def encode(self) -> bytes:
        """Return the nonce and the memory."""
        return self.nonce + self.memory.encode()

    @classmethod
    def decode(cls, data: bytes) -> "NixlProbe":
        """Read a nonce and memory. Raises ProtocolError."""
        return cls(NixlMemory.decode(data[NONCE_BYTES:]), data[:NONCE_BYTES])
