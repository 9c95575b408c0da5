"""Which blocks a node holds, and which are on their way to it: what nodes tell each other (pure).

On the wire: version, reserved, blocks, epoch, then two bitmaps of ceil(blocks / 8) bytes, block 0 in the
lowest bit of the first byte. Everything is little-endian and of a length that follows from `blocks`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from struct import Struct

from rdmacast.errors import ProtocolError

VERSION = 1
MAX_BLOCKS = 1 << 16
_HEAD = Struct("<BxxxIQ")
LEAST_MAP_BYTES = _HEAD.size + 2
MOST_MAP_BYTES = _HEAD.size + 2 * MAX_BLOCKS // 8


def bits_of(blocks: Iterable[int]) -> int:
    bits = 0
    for block in blocks:
        bits |= 1 << block
    return bits


def blocks_in(bits: int) -> Iterator[int]:
    """The numbers of the bits that are set, ascending."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def blocks_of(nbytes: int, block_bytes: int) -> int:
    """How many blocks a region has. Raises ProtocolError if no have-map could name them."""
    blocks = -(-nbytes // block_bytes)
    if not 1 <= blocks <= MAX_BLOCKS:
        raise ProtocolError(f"{nbytes} bytes are {blocks} blocks of {block_bytes}; 1 to {MAX_BLOCKS} may be")
    return blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class HaveMap:
    """Blocks of a cast as bits: held (and checked), and under way from somebody who holds them.

    `epoch` grows when a node comes back, or lost what it held; a map of an older one is stale.
    """

    blocks: int
    epoch: int
    held: int
    coming: int = 0

    def __repr__(self) -> str:
        return (
            f"HaveMap({self.held.bit_count()} of {self.blocks} held, {self.coming.bit_count()} coming, "
            f"epoch {self.epoch})"
        )

    def tells_more(self, before: "HaveMap") -> bool:
        """Whether those who know the map `before` must hear of this one.

        That more is coming need not be told at once: who is to give it holds it already.
        """
        gone = before.coming & ~self.coming & ~self.held
        return self.epoch != before.epoch or self.held != before.held or gone != 0

    def encode(self) -> bytes:
        size = -(-self.blocks // 8)
        head = _HEAD.pack(VERSION, self.blocks, self.epoch)
        return head + self.held.to_bytes(size, "little") + self.coming.to_bytes(size, "little")

    @staticmethod
    def decode(data: bytes) -> "HaveMap":
        """Raises ProtocolError."""
        if len(data) < _HEAD.size:
            raise ProtocolError("a have-map is cut off")
        version, blocks, epoch = _HEAD.unpack_from(data)
        if version != VERSION:
            raise ProtocolError(f"a have-map of version {version}, not {VERSION}")
        size = -(-blocks // 8)
        if not 1 <= blocks <= MAX_BLOCKS or len(data) != _HEAD.size + 2 * size:
            raise ProtocolError(f"a have-map of {blocks} blocks in {len(data)} bytes")
        held = int.from_bytes(data[_HEAD.size : _HEAD.size + size], "little")
        coming = int.from_bytes(data[_HEAD.size + size :], "little")
        if (held | coming) >> blocks:
            raise ProtocolError(f"a have-map tells of blocks beyond its {blocks}")
        return HaveMap(blocks=blocks, epoch=epoch, held=held, coming=coming)
