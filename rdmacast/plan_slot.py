"""The slot of a plan in which a block leaves its source's port (pure)."""

import struct
from dataclasses import dataclass
from zlib import crc32

from rdmacast.errors import ProtocolError

_DUE = struct.Struct(">III")
SLOT_BYTES = _DUE.size
MAX_STEPS = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSlot:
    """The slot `step` of the plan of the cast with this mark.

    The block that leaves the source before it does so in one of the first `after` steps; none leaves
    between these and `step`.
    """

    mark: int
    step: int
    after: int

    def encode(self) -> bytes:
        if not (0 <= self.mark < 1 << 32 and 0 <= self.after <= self.step < MAX_STEPS):
            raise ProtocolError(f"a plan slot is out of bounds: {self}")
        return _DUE.pack(self.mark, self.step, self.after)

    @classmethod
    def decode(cls, data: bytes) -> "PlanSlot":
        """Read SLOT_BYTES. Raises ProtocolError."""
        mark, step, after = _DUE.unpack(data)
        if not after <= step < MAX_STEPS:
            raise ProtocolError(f"a plan slot {step} after {after} is out of bounds")
        return cls(mark=mark, step=step, after=after)


def plan_mark(cast: str) -> int:
    """Return a 32-bit mark of a cast's plan."""
    return crc32(cast.encode())
