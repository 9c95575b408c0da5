"""What two ends of one-sided reads tell each other over their TCP connection (pure)."""

import struct
from dataclasses import dataclass

from rdmacast.errors import ProtocolError

NONCE_BYTES = 16
MTUS = (256, 512, 1024, 2048, 4096)

_ADDRESS = struct.Struct(">IIHHB16s")
_MEMORY = struct.Struct(">QI")
ADDRESS_BYTES = _ADDRESS.size
MEMORY_BYTES = _MEMORY.size


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePairAddress:
    """Where a queue pair is. `reads` is how many READs at once it answers, `lid` is 0 on Ethernet."""

    number: int
    first_psn: int
    lid: int
    mtu_bytes: int
    reads: int
    gid: bytes

    def encode(self) -> bytes:
        return _ADDRESS.pack(
            self.number, self.first_psn, self.lid, self.mtu_bytes, min(self.reads, 255), self.gid
        )

    @classmethod
    def decode(cls, data: bytes) -> "QueuePairAddress":
        """Raises ProtocolError."""
        number, first_psn, lid, mtu_bytes, reads, gid = _ADDRESS.unpack(data)
        if number >= 1 << 24 or first_psn >= 1 << 24 or mtu_bytes not in MTUS or not reads:
            raise ProtocolError("a queue pair's address is out of bounds")
        return cls(number=number, first_psn=first_psn, lid=lid, mtu_bytes=mtu_bytes, reads=reads, gid=gid)


@dataclass(frozen=True, slots=True)
class RemoteMemory:
    """Memory of a peer that may be read from `address` on with `rkey`."""

    address: int
    rkey: int

    def encode(self) -> bytes:
        return _MEMORY.pack(self.address, self.rkey)

    @classmethod
    def decode(cls, data: bytes) -> "RemoteMemory":
        return cls(*_MEMORY.unpack(data))


@dataclass(frozen=True, slots=True)
class Answering:
    """A queue pair made ready for a peer; reading NONCE_BYTES at `probe` must give `nonce`."""

    address: QueuePairAddress
    probe: RemoteMemory
    nonce: bytes

    def encode(self) -> bytes:
        return self.address.encode() + self.probe.encode() + self.nonce

    @classmethod
    def decode(cls, data: bytes) -> "Answering":
        """Raises ProtocolError."""
        end = ADDRESS_BYTES + MEMORY_BYTES
        return cls(
            QueuePairAddress.decode(data[:ADDRESS_BYTES]),
            RemoteMemory.decode(data[ADDRESS_BYTES:end]),
            data[end:],
        )


ANSWERING_BYTES = ADDRESS_BYTES + MEMORY_BYTES + NONCE_BYTES
