"""The blocks that a node holds, and those that it expects, as nodes exchange them (pure).

On the wire: version, reserved, blocks, epoch, then two bitmaps of ceil(blocks / 8) bytes, block 0 in the
lowest bit of the first byte. All numbers are little-endian, and the length follows from `blocks`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from struct import Struct

from rdmacast.errors import ProtocolError

VERSION = 1
MAX_BLOCKS = 1 << 16
_HEAD = Struct("<BxxxIQ")
MIN_BITFIELD_BYTES = _HEAD.size + 2
MAX_BITFIELD_BYTES = _HEAD.size + 2 * MAX_BLOCKS // 8


def to_bits(blocks: Iterable[int]) -> int:
    bits = 0
    for block in blocks:
        bits |= 1 << block
    return bits


def blocks_in(bits: int) -> Iterator[int]:
    """Yield the numbers of the bits that are set, ascending."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def block_count(nbytes: int, block_bytes: int) -> int:
    """Return the number of blocks of a region. Raises ProtocolError if a bitfield cannot hold them."""
    blocks = -(-nbytes // block_bytes)
    if not 1 <= blocks <= MAX_BLOCKS:
        raise ProtocolError(f"{nbytes} bytes are {blocks} blocks of {block_bytes}; use 1 to {MAX_BLOCKS}")
    return blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Bitfield:
    """The blocks of a cast as bits: those that are held (and checked), and those pending.

    A pending block is on its way from a node that holds it. `epoch` grows when a node returns or loses
    blocks; a bitfield of an older epoch is stale.
    """

    blocks: int
    epoch: int
    held: int
    pending: int = 0

    def __repr__(self) -> str:
        return (
            f"Bitfield({self.held.bit_count()} of {self.blocks} held, {self.pending.bit_count()} coming, "
            f"epoch {self.epoch})"
        )

    def is_news_after(self, before: "Bitfield") -> bool:
        """Return whether receivers of the bitfield `before` need this one.

        More pending blocks alone are no reason: their source holds them already.
        """
        gone = before.pending & ~self.pending & ~self.held
        return self.epoch != before.epoch or self.held != before.held or gone != 0

    def encode(self) -> bytes:
        size = -(-self.blocks // 8)
        head = _HEAD.pack(VERSION, self.blocks, self.epoch)
        return head + self.held.to_bytes(size, "little") + self.pending.to_bytes(size, "little")

    @staticmethod
    def decode(data: bytes) -> "Bitfield":
        """Read what `encode` returned. Raises ProtocolError."""
        if len(data) < _HEAD.size:
            raise ProtocolError("a bitfield is truncated")
        version, blocks, epoch = _HEAD.unpack_from(data)
        if version != VERSION:
            raise ProtocolError(f"a bitfield of version {version}, not {VERSION}")
        size = -(-blocks // 8)
        if not 1 <= blocks <= MAX_BLOCKS or len(data) != _HEAD.size + 2 * size:
            raise ProtocolError(f"a bitfield of {blocks} blocks in {len(data)} bytes")
        held = int.from_bytes(data[_HEAD.size : _HEAD.size + size], "little")
        pending = int.from_bytes(data[_HEAD.size + size :], "little")
        if (held | pending) >> blocks:
            raise ProtocolError(f"a bitfield has blocks beyond its {blocks}")
        return Bitfield(blocks=blocks, epoch=epoch, held=held, pending=pending)
