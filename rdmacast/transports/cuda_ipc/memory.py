"""The payload of the CUDA IPC transport: an allocation, and the place of a range in it (pure)."""

import struct
from dataclasses import dataclass

from rdmacast.errors import ProtocolError

HANDLE_BYTES = 64

_MEMORY = struct.Struct(f">{HANDLE_BYTES}sQQ")
MEMORY_BYTES = _MEMORY.size


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaIpcMemory:
    """A range of GPU memory that begins `offset` bytes into an allocation.

    `handle` names the whole allocation of `allocation_bytes`.
    """

    handle: bytes
    allocation_bytes: int
    offset: int

    def encode(self) -> bytes:
        """Return MEMORY_BYTES."""
        return _MEMORY.pack(self.handle, self.allocation_bytes, self.offset)

    @classmethod
    def decode(cls, data: bytes) -> "CudaIpcMemory":
        """Read MEMORY_BYTES. Raises ProtocolError."""
        if len(data) != MEMORY_BYTES:
            raise ProtocolError(f"a payload of CUDA IPC has {len(data)} bytes, not {MEMORY_BYTES}")
        handle, allocation_bytes, offset = _MEMORY.unpack(data)
        if offset >= allocation_bytes:
            raise ProtocolError("a range of GPU memory begins outside its allocation")
        return cls(handle=handle, allocation_bytes=allocation_bytes, offset=offset)
