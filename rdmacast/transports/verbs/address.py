"""Payloads of the verbs transport: the addresses that two ends of one-sided reads exchange (pure)."""

import struct
from dataclasses import dataclass

from rdmacast.errors import ProtocolError

NONCE_BYTES = 16
MTUS = (256, 512, 1024, 2048, 4096)

_ADDRESS = struct.Struct(">IIHHB16s")
_MEMORY = struct.Struct(">QI")
ADDRESS_BYTES = _ADDRESS.size
MEMORY_BYTES = _MEMORY.size
REPLY_BYTES = ADDRESS_BYTES + MEMORY_BYTES + NONCE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePairAddress:
    """The address of a queue pair.

    `reads` is the number of concurrent READs that it serves; `lid` is 0 on Ethernet.
    """

    number: int
    first_psn: int
    lid: int
    mtu_bytes: int
    reads: int
    gid: bytes

    def encode(self) -> bytes:
        """Return ADDRESS_BYTES."""
        return _ADDRESS.pack(
            self.number, self.first_psn, self.lid, self.mtu_bytes, min(self.reads, 255), self.gid
        )

    @classmethod
    def decode(cls, data: bytes) -> "QueuePairAddress":
        """Read ADDRESS_BYTES. Raises ProtocolError."""
        _check_length(data, ADDRESS_BYTES)
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
        """Return MEMORY_BYTES."""
        return _MEMORY.pack(self.address, self.rkey)

    @classmethod
    def decode(cls, data: bytes) -> "RemoteMemory":
        """Read MEMORY_BYTES. Raises ProtocolError."""
        _check_length(data, MEMORY_BYTES)
        return cls(*_MEMORY.unpack(data))


@dataclass(frozen=True, slots=True)
class QueuePairReply:
    """The queue pair that a server connected to ours; reading NONCE_BYTES at `probe` must yield `nonce`."""

    address: QueuePairAddress
    probe: RemoteMemory
    nonce: bytes

    def encode(self) -> bytes:
        """Return REPLY_BYTES."""
        return self.address.encode() + self.probe.encode() + self.nonce

    @classmethod
    def decode(cls, data: bytes) -> "QueuePairReply":
        """Read REPLY_BYTES. Raises ProtocolError."""
        _check_length(data, REPLY_BYTES)
        end = ADDRESS_BYTES + MEMORY_BYTES
        return cls(
            QueuePairAddress.decode(data[:ADDRESS_BYTES]),
            RemoteMemory.decode(data[ADDRESS_BYTES:end]),
            data[end:],
        )


def _check_length(data: bytes, nbytes: int) -> None:
    if len(data) != nbytes:
        raise ProtocolError(f"a payload of verbs has {len(data)} bytes, not {nbytes}")
