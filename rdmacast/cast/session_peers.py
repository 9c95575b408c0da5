"""The state of a cast's other nodes: what they hold, and what failed (pure)."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from rdmacast.bitfield import Bitfield, blocks_in, to_bits


@dataclass(slots=True)
class _Peer:
    """One other node.

    `unreported`: no bitfield since a node was lost. `stalled`: a pull from it took too long, and none has
    arrived since. `stuck`: it does not get what it is to pass on.
    """

    epoch: int = -1
    held: int = 0
    pending: int = 0
    alive: bool = True
    unreported: bool = True
    stalled: bool = False
    stuck: bool = False
    failures: int = 0  # in a row
    tries: dict[int, int] = field(default_factory=dict)  # by block: pulls that failed or brought damage
    tried: int = 0  # the blocks of `tries`, as bits
    spent: int = 0  # those of them that had all their tries


class Peers:
    """The nodes that blocks may be pulled from; more may join later. Of equal ones the `near` come first."""

    def __init__(
        self, nodes: Iterable[int], *, max_tries: int, max_failures: int, near: frozenset[int] = frozenset()
    ) -> None:
        self._peers = {node: _Peer() for node in nodes}
        self._near = near
        self._max_tries = max_tries
        self._max_failures = max_failures
        self._holders: dict[int, None] = {}  # by their first report of a block

    def __repr__(self) -> str:
        return f"Peers({len(list(self.alive))} of {len(self._peers)} alive)"

    def presume(self, nodes: Iterable[int], blocks: int) -> None:
        """Take the nodes to hold the blocks, as bits, as if they had reported it."""
        for node in nodes:
            self._peers[node] = _Peer(epoch=0, held=blocks, unreported=False)
            self._holders[node] = None

    @property
    def alive(self) -> Iterator[int]:
        return (node for node, peer in self._peers.items() if peer.alive)

    @property
    def unreported(self) -> list[int]:
        return [node for node, peer in self._peers.items() if peer.alive and peer.unreported]

    def is_unreported(self, node: int) -> bool:
        return node in self._peers and self._peers[node].alive and self._peers[node].unreported

    def is_newer(self, node: int, epoch: int) -> bool:
        """Return whether a bitfield of the node is of a later epoch."""
        return node in self._peers and self._peers[node].epoch > epoch

    def on_bitfield(self, node: int, reported: Bitfield, *, is_answer: bool) -> None:
        """Record a bitfield; those of an older epoch, or from before the node's loss, are ignored."""
        peer = self._peers.setdefault(node, _Peer())
        if reported.epoch < peer.epoch or (not peer.alive and reported.epoch <= peer.epoch):
            return
        if reported.epoch > peer.epoch:
            peer.tries.clear()
            peer.failures, peer.held, peer.tried, peer.spent = 0, 0, 0, 0
        if reported.held & ~peer.held:
            peer.stuck = False
        peer.epoch, peer.alive, peer.unreported = reported.epoch, True, peer.unreported and not is_answer
        peer.held |= reported.held
        if reported.held:
            self._holders[node] = None
        peer.pending = reported.pending & ~peer.held

    def mark_lost(self, node: int) -> None:
        """Mark a node as lost: the others must report again what is left."""
        self._peers.setdefault(node, _Peer()).alive = False
        for peer in self._peers.values():
            peer.unreported = True

    def on_success(self, node: int) -> None:
        peer = self._peers[node]
        peer.failures, peer.stalled = 0, False

    def forget_stalls(self) -> None:
        """Forget which nodes stalled: they may have waited for a slow node."""
        for peer in self._peers.values():
            peer.stalled = False

    def on_failure(self, node: int, block: int, *, whole_peer: bool) -> bool:
        """Record a failed pull, with `whole_peer` as the node's fault and not only the block's.

        Returns whether the node has failed so often that it is considered lost.
        """
        peer = self._peers[node]
        peer.tries[block] = peer.tries.get(block, 0) + 1
        peer.tried |= 1 << block
        if peer.tries[block] >= self._max_tries:
            peer.spent |= 1 << block
        peer.failures += whole_peer
        return peer.alive and peer.failures >= self._max_failures

    def may_wait_at(self, node: int) -> bool:
        """Return whether a pull may wait at the node for a block: it takes part and has not stalled."""
        return node in self._peers and self._peers[node].epoch >= 0 and not self._peers[node].stalled

    def can_serve(self, node: int, block: int) -> bool:
        """Return whether the node holds the block and has attempts left for it."""
        return bool(self.servable(node) >> block & 1)

    def servable(self, node: int) -> int:
        """Return the blocks, as bits, that the node holds and can be pulled from it."""
        peer = self._peers.get(node)
        return peer.held & ~peer.spent if peer is not None and peer.alive else 0

    def all_servable(self) -> int:
        """Return the blocks, as bits, that can be pulled from any node."""
        bits = 0
        for node in self._holders:
            bits |= self.servable(node)
        return bits

    def best_sources(self, blocks: int, pulls: Sequence[int]) -> dict[int, int]:
        """Return the best sources for any of the blocks, and the blocks of each, with these pulls pending.

        Those that have not stalled come first, then those without failed pulls of a block, then near ones,
        then those with fewest pending pulls. The node that holds least comes first: a source serves others,
        too.
        """
        found: dict[int, int] = {}
        best: tuple[bool, int, bool, int] | None = None
        for node in self._holders:
            if servable := self.servable(node) & blocks:
                tries, offered = self._least_tried(self._peers[node], servable)
                rank = (self._peers[node].stalled, tries, node not in self._near, pulls.count(node))
                if best is None or rank <= best:
                    found = {node: offered} if rank != best else found | {node: offered}
                    best = rank
        return dict(sorted(found.items(), key=lambda offer: self._peers[offer[0]].held.bit_count()))

    @staticmethod
    def _least_tried(peer: _Peer, servable: int) -> tuple[int, int]:
        """Return the fewest failed pulls of any of the blocks from the peer, and those blocks."""
        if untried := servable & ~peer.tried:
            return 0, untried
        fewest = min(peer.tries[block] for block in blocks_in(servable))
        return fewest, to_bits(block for block in blocks_in(servable) if peer.tries[block] == fewest)

    def rarest(self, blocks: int) -> int:
        """Return those of the blocks, as bits, that the fewest nodes hold or expect."""
        digits: list[int] = []  # the counts of all blocks, as binary digits: the lowest first
        for peer in self._peers.values():
            carry = (peer.held | peer.pending) & blocks if peer.alive else 0
            for place, digit in enumerate(digits):
                digits[place], carry = digit ^ carry, digit & carry
            if carry:
                digits.append(carry)
        for digit in reversed(digits):
            blocks = blocks & ~digit or blocks
        return blocks

    def reachable(self, *, pending: bool) -> int:
        """Return the blocks, as bits, that a living node holds, or with `pending` expects, and can serve."""
        bits = 0
        for peer in self._peers.values():
            if peer.alive:
                bits |= (peer.held | (peer.pending if pending else 0)) & ~peer.spent
        return bits

    def has_other_source(self, block: int, besides: int) -> bool:
        """Return whether another node, which has not stalled, can serve the block."""
        others = (node for node in self._holders if node != besides and not self._peers[node].stalled)
        return any(self.can_serve(node, block) for node in others)

    def mark_stalled(self, node: int) -> None:
        self._peers[node].stalled = True

    def mark_stuck(self, node: int) -> None:
        if node in self._peers:
            self._peers[node].stuck = True

    def expected(self, node: int, blocks: int) -> int:
        """Return those of the blocks, as bits, that are expected from the node: it holds or will get them."""
        peer = self._peers.get(node)
        if peer is None or not peer.alive or peer.stuck:
            return 0
        return blocks & ~peer.tried & ~(peer.held if peer.stalled else 0)
