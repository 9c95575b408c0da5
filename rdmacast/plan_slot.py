"""When a block is to leave its source by the plan (pure)."""

import struct
from dataclasses import dataclass
from zlib import crc32

from rdmacast.errors import ProtocolError

_DUE = struct.Struct(">III")
DUE_BYTES = _DUE.size
MOST_STEPS = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """In `step` of the plan of the cast that is marked so. What leaves its source in one of the first `after`
    steps leaves before it; between these and `step` nothing does."""

    mark: int
    step: int
    after: int

    def encode(self) -> bytes:
        if not (0 <= self.mark < 1 << 32 and 0 <= self.after <= self.step < MOST_STEPS):
            raise ProtocolError(f"nothing can be due as {self} says")
        return _DUE.pack(self.mark, self.step, self.after)

    @classmethod
    def decode(cls, data: bytes) -> "Due":
        """Raises ProtocolError."""
        mark, step, after = _DUE.unpack(data)
        if not after <= step < MOST_STEPS:
            raise ProtocolError(f"nothing is due in step {step} after {after}")
        return cls(mark=mark, step=step, after=after)


def mark_of(cast: str) -> int:
    """A short name of a cast's plan."""
    return crc32(cast.encode())
