"""The planned source of each missing block, and which of them are worth waiting for (pure)."""

from collections.abc import Callable, ItemsView, Sequence

from rdmacast.cast.session_peers import Peers


class SessionPlan:
    """The missing blocks in the order to pull; sets of blocks are bits."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._sources: dict[int, int | None] = {}  # by block
        self._planned_of: dict[int, int] = {}  # by source

    def __repr__(self) -> str:
        return f"SessionPlan({len(self._sources)} blocks from {len(self._planned_of)} nodes)"

    @property
    def pulls(self) -> ItemsView[int, int | None]:
        """(block, its planned source) in order; those without a source come last."""
        return self._sources.items()

    def load(self, order: Sequence[tuple[int, int]], held: int) -> None:
        """Follow this order of (source, block) from now on."""
        planned: dict[int, int | None] = {
            block: source for source, block in order if 0 <= block < self._blocks
        }
        planned.update((block, None) for block in range(self._blocks) if block not in planned)
        self._sources = {block: source for block, source in planned.items() if not held >> block & 1}
        self._planned_of = {}
        for block, source in self._sources.items():
            if source is not None:
                self._planned_of[source] = self._planned_of.get(source, 0) | 1 << block

    def source(self, block: int) -> int | None:
        return self._sources.get(block)

    def remove(self, block: int) -> None:
        self._sources.pop(block, None)

    def expected(self, blocks: int, peers: Peers) -> int:
        """Return those of the blocks whose planned source is worth waiting for."""
        return self._of_each(blocks, peers.expected)

    def available(self, blocks: int, peers: Peers) -> int:
        """Return those of the blocks that their planned source holds and can serve."""
        return self._of_each(blocks, lambda source, planned: planned & peers.servable(source))

    def unreported(self, blocks: int, peers: Peers) -> list[int]:
        """Return planned sources of the blocks that have not reported a bitfield."""
        sources = [source for source, planned in self._planned_of.items() if planned & blocks]
        return sorted(source for source in sources if peers.is_unreported(source))

    def _of_each(self, blocks: int, choose: Callable[[int, int], int]) -> int:
        bits = 0
        for source, planned in self._planned_of.items():
            if planned & blocks:
                bits |= choose(source, planned & blocks)
        return bits
