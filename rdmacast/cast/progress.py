"""The bookkeeping of a pull: missing, pending and finished blocks, and the next source (pure).

A block is `missing` until it is assigned, `in flight` until its fetch ends, and `done` once its bytes were
checked. It returns to `missing` when its source is lost (no attempt is counted) or its bytes were damaged
(one attempt is counted, and another source is preferred).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from rdmacast.errors import ChecksumError, NoHolder
from rdmacast.intervals import IntervalSet


@dataclass(frozen=True, slots=True)
class BlockFetch:
    """Read block `block`, bytes `[offset, offset + nbytes)`, from source `source` (an index)."""

    block: int
    offset: int
    nbytes: int
    source: int


class PullProgress:
    """A pull of `nbytes` in blocks of `block_bytes` from `sources` sources, the first preferred."""

    def __init__(self, nbytes: int, block_bytes: int, sources: int, max_tries: int) -> None:
        if nbytes < 0 or block_bytes <= 0 or max_tries <= 0:
            raise ValueError("a pull needs nbytes of 0 or more, and block_bytes and max_tries above 0")
        self._nbytes = nbytes
        self._block_bytes = block_bytes
        self._max_tries = max_tries
        self._missing = list(range(-(-nbytes // block_bytes)))  # a heap: execution order first
        self._in_flight: dict[int, int] = {}
        self._done = IntervalSet()
        self._tries: dict[int, int] = {}
        self._damaged_by: dict[int, set[int]] = {}
        self._lost: dict[int, str] = {}
        self._sources = sources
        self.retries = 0

    def __repr__(self) -> str:
        return (
            f"PullProgress({len(self._missing)} missing, {len(self._in_flight)} in flight, "
            f"{self._sources - len(self._lost)} of {self._sources} sources)"
        )

    @property
    def is_complete(self) -> bool:
        return self._done.covers(0, self._nbytes)

    @property
    def missing(self) -> tuple[tuple[int, int], ...]:
        """Byte ranges that are not here yet."""
        return self._done.missing(0, self._nbytes)

    def is_lost(self, source: int) -> bool:
        return source in self._lost

    def assign(self) -> BlockFetch | None:
        """Return the next fetch; None until one in flight ends. Raises NoHolder."""
        if not self._missing:
            return None
        alive = [source for source in range(self._sources) if source not in self._lost]
        if not alive and self._in_flight:
            return None  # what was read before its source was lost still counts
        if not alive:
            raise NoHolder(self._describe_loss(), self.missing)
        block = heappop(self._missing)
        damaged_by = self._damaged_by.get(block, set())
        # Where every source sent damage, the fault may be on the path: try the first one again.
        source = next((source for source in alive if source not in damaged_by), alive[0])
        self._in_flight[block] = source
        offset = block * self._block_bytes
        return BlockFetch(block, offset, min(self._block_bytes, self._nbytes - offset), source)

    def arrived(self, fetch: BlockFetch) -> None:
        """Record a block that arrived and was checked."""
        del self._in_flight[fetch.block]
        self._done.add(fetch.offset, fetch.offset + fetch.nbytes)

    def damaged(self, fetch: BlockFetch, units: Sequence[int]) -> None:
        """Record a block with damaged `units`. Raises ChecksumError after its last attempt."""
        del self._in_flight[fetch.block]
        tries = self._tries[fetch.block] = self._tries.get(fetch.block, 0) + 1
        if tries >= self._max_tries:
            named = ", ".join(map(str, units[:8])) + (", …" if len(units) > 8 else "")
            raise ChecksumError(
                f"block {fetch.block} arrived damaged {tries} times (units {named})", tuple(units)
            )
        self._damaged_by.setdefault(fetch.block, set()).add(fetch.source)
        self.retries += 1
        heappush(self._missing, fetch.block)

    def lost(self, fetch: BlockFetch, reason: str) -> None:
        """Record that the fetch's source is lost; no more blocks are assigned to it."""
        self._lost.setdefault(fetch.source, reason)
        del self._in_flight[fetch.block]
        self.retries += 1
        heappush(self._missing, fetch.block)

    def check_integrity(self) -> None:
        """Assert that every block is in exactly one state."""
        blocks = -(-self._nbytes // self._block_bytes)
        missing = set(self._missing)
        assert len(missing) == len(self._missing) and not missing & set(self._in_flight)
        for block in range(blocks):
            start = block * self._block_bytes
            done = self._done.covers(start, min(start + self._block_bytes, self._nbytes))
            assert done != (block in missing or block in self._in_flight), block

    def _describe_loss(self) -> str:
        ranges = self.missing
        shown = ", ".join(f"[{start}, {end})" for start, end in ranges[:4]) + (", …" if ranges[4:] else "")
        reasons = "; ".join(f"source {source}: {reason}" for source, reason in sorted(self._lost.items()))
        return f"no holder is left for bytes {shown} ({reasons or 'there was none'})"
