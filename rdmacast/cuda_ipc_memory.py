"""What a reader of GPU memory is told: of which allocation, and where in it (pure)."""

import struct
from dataclasses import dataclass

from rdmacast.errors import ProtocolError

HANDLE_BYTES = 64

_LENT = struct.Struct(f">{HANDLE_BYTES}sQQ")
LENT_BYTES = _LENT.size


@dataclass(frozen=True, slots=True, kw_only=True)
class LentMemory:
    """A range of GPU memory. `handle` is that of the whole allocation of `allocation_bytes`, `offset` where
    the range begins in it."""

    handle: bytes
    allocation_bytes: int
    offset: int

    def encode(self) -> bytes:
        return _LENT.pack(self.handle, self.allocation_bytes, self.offset)

    @classmethod
    def decode(cls, data: bytes) -> "LentMemory":
        """Raises ProtocolError."""
        handle, allocation_bytes, offset = _LENT.unpack(data)
        if offset >= allocation_bytes:
            raise ProtocolError("a range of GPU memory begins outside its allocation")
        return cls(handle=handle, allocation_bytes=allocation_bytes, offset=offset)
