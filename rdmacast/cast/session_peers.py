"""What a node knows of the others in its cast: what they hold, how fast they are, who failed (pure)."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from rdmacast.have_map import HaveMap, bits_of, blocks_in
from rdmacast.session_settings import SLOW

SAMPLES = 15  # the latest pulls from anybody, whose median is what is usual
LEAST_SAMPLES = 5
PATIENT = 5  # times as long as a pull takes that counts as slow


@dataclass(slots=True)
class _Peer:
    """One other node.

    `unheard`: it has not told what it holds since somebody was lost. `stalled`: a pull from it took too
    long, and none has come since. `stuck`: what it is to pass on does not come to it.
    """

    epoch: int = -1
    held: int = 0
    coming: int = 0
    alive: bool = True
    unheard: bool = True
    stalled: bool = False
    stuck: bool = False
    failures: int = 0  # in a row
    tries: dict[int, int] = field(default_factory=dict)  # by block: pulls that failed or brought damage
    tried: int = 0  # the blocks of `tries`, as bits
    spent: int = 0  # those of them that had all their tries
    pulls_s: deque[float] = field(default_factory=lambda: deque(maxlen=3))
    mean_s: float = 0.0  # of these


class Peers:
    """All that may give us blocks. Nodes that are not named at first may turn up later."""

    def __init__(
        self, nodes: Iterable[int], *, max_tries: int, max_failures: int, least_slow_s: float = 0.0
    ) -> None:
        self._peers = {node: _Peer() for node in nodes}
        self._max_tries = max_tries
        self._max_failures = max_failures
        self._least_slow_s = least_slow_s
        self._pulls_s: deque[float] = deque(maxlen=SAMPLES)
        self._slow_s: float | None = None
        self._holders: dict[int, None] = {}  # who ever held anything, in the order of hearing

    def __repr__(self) -> str:
        return f"Peers({len(list(self.alive))} of {len(self._peers)} alive)"

    @property
    def alive(self) -> Iterator[int]:
        return (node for node, peer in self._peers.items() if peer.alive)

    @property
    def unheard(self) -> list[int]:
        return [node for node, peer in self._peers.items() if peer.alive and peer.unheard]

    def is_unheard(self, node: int) -> bool:
        return node in self._peers and self._peers[node].alive and self._peers[node].unheard

    def is_newer(self, node: int, epoch: int) -> bool:
        """Whether the node was heard of after that epoch."""
        return node in self._peers and self._peers[node].epoch > epoch

    def heard(self, node: int, told: HaveMap, *, is_answer: bool) -> None:
        """Maps of an older epoch are stale, and so are those that a lost node sent before it was lost."""
        peer = self._peers.setdefault(node, _Peer())
        if told.epoch < peer.epoch or (not peer.alive and told.epoch <= peer.epoch):
            return
        if told.epoch > peer.epoch:
            peer.tries.clear()
            peer.failures, peer.held, peer.tried, peer.spent = 0, 0, 0, 0
        if told.held & ~peer.held:
            peer.stuck = False
        peer.epoch, peer.alive, peer.unheard = told.epoch, True, peer.unheard and not is_answer
        peer.held |= told.held
        if told.held:
            self._holders[node] = None
        peer.coming = told.coming & ~peer.held

    def lost(self, node: int) -> None:
        """Nothing is expected of it any more; the others must tell anew what is left."""
        self._peers.setdefault(node, _Peer()).alive = False
        for peer in self._peers.values():
            peer.unheard = True

    def succeeded(self, node: int, seconds: float) -> None:
        peer = self._peers[node]
        peer.failures, peer.stalled = 0, False
        peer.pulls_s.append(seconds)
        peer.mean_s = fmean(peer.pulls_s)
        self._pulls_s.append(seconds)
        if len(self._pulls_s) >= LEAST_SAMPLES:
            self._slow_s = max(SLOW * median(self._pulls_s), self._least_slow_s)

    def forget_pulls(self) -> None:
        """What they took tells nothing any more: they were too few at once, or waited for a slow node's."""
        self._pulls_s.clear()
        self._slow_s = None
        for peer in self._peers.values():
            peer.pulls_s.clear()
            peer.mean_s = 0.0
            peer.stalled = False

    def failed(self, node: int, block: int, *, whole_peer: bool) -> bool:
        """A pull ended badly; with `whole_peer` it tells of the node, not of the block alone.

        Whether the node has failed so often that it should be taken for lost.
        """
        peer = self._peers[node]
        peer.tries[block] = peer.tries.get(block, 0) + 1
        peer.tried |= 1 << block
        if peer.tries[block] >= self._max_tries:
            peer.spent |= 1 << block
        peer.failures += whole_peer
        return peer.alive and peer.failures >= self._max_failures

    def may_wait_at(self, node: int) -> bool:
        """Whether a pull may wait at the node for what comes to it: it has said that it takes part."""
        return node in self._peers and self._peers[node].epoch >= 0 and not self.is_slow(node)

    def gives(self, node: int, block: int) -> bool:
        """Whether the node holds the block and may be asked for it."""
        return bool(self.gift(node) >> block & 1)

    def gift(self, node: int) -> int:
        """The blocks, as bits, that the node holds and may be asked for."""
        peer = self._peers.get(node)
        return peer.held & ~peer.spent if peer is not None and peer.alive else 0

    def gifts(self) -> int:
        """The blocks, as bits, that anybody holds and may be asked for."""
        bits = 0
        for node in self._holders:
            bits |= self.gift(node)
        return bits

    def offers(self, blocks: int, pulls: Sequence[int]) -> dict[int, int]:
        """Who is best to be asked for any of these blocks, and for which, while there are `pulls` from these.

        The quick before the slow, those of which no pull of a block ended badly, then who we pull least from
        now. Who holds least comes first: a source has others to serve.
        """
        found: dict[int, int] = {}
        best: tuple[bool, int, int] | None = None
        for node in self._holders:
            if gift := self.gift(node) & blocks:
                tries, offered = self._least_tried(self._peers[node], gift)
                rank = (self.is_slow(node), tries, pulls.count(node))
                if best is None or rank <= best:
                    found = {node: offered} if rank != best else found | {node: offered}
                    best = rank
        return dict(sorted(found.items(), key=lambda offer: self._peers[offer[0]].held.bit_count()))

    @staticmethod
    def _least_tried(peer: _Peer, gift: int) -> tuple[int, int]:
        """Those of the blocks of which fewest pulls from the peer ended badly, and how many did."""
        if untried := gift & ~peer.tried:
            return 0, untried
        fewest = min(peer.tries[block] for block in blocks_in(gift))
        return fewest, bits_of(block for block in blocks_in(gift) if peer.tries[block] == fewest)

    def rarest(self, blocks: int) -> int:
        """Those of the blocks, as bits, that fewest hold or are about to hold."""
        digits: list[int] = []  # the counts of all blocks, as binary digits: the lowest first
        for peer in self._peers.values():
            carry = (peer.held | peer.coming) & blocks if peer.alive else 0
            for place, digit in enumerate(digits):
                digits[place], carry = digit ^ carry, digit & carry
            if carry:
                digits.append(carry)
        for digit in reversed(digits):
            blocks = blocks & ~digit or blocks
        return blocks

    def reachable(self, *, coming: bool) -> int:
        """The blocks, as bits, that somebody holds, or with `coming` is about to hold, and could give."""
        bits = 0
        for peer in self._peers.values():
            if peer.alive:
                bits |= (peer.held | (peer.coming if coming else 0)) & ~peer.spent
        return bits

    def has_quick_giver(self, block: int, besides: int) -> bool:
        bit = 1 << block
        for node in self._holders:
            if node != besides:
                peer = self._peers[node]
                if peer.held & bit and peer.alive and not peer.spent & bit and not self._is_slow(peer):
                    return True
        return False

    @property
    def slow_s(self) -> float | None:
        """How long a pull may take before its source counts as slow; None while too little is known."""
        return self._slow_s

    def patience_s(self, most_s: float) -> float:
        """How long to wait, without any pull, for what planned sources do not get: one of them may hang."""
        return most_s if self._slow_s is None else min(most_s, PATIENT * self._slow_s)

    def is_slow(self, node: int) -> bool:
        """Whether the latest pulls from the node came at under half of the median rate, or did not come."""
        return self._is_slow(self._peers[node])

    def _is_slow(self, peer: _Peer) -> bool:
        return peer.stalled or (self._slow_s is not None and peer.mean_s > self._slow_s)

    def stalled(self, node: int) -> None:
        self._peers[node].stalled = True

    def stuck(self, node: int) -> None:
        if node in self._peers:
            self._peers[node].stuck = True

    def expected(self, node: int, blocks: int) -> int:
        """Those of the blocks, as bits, that the node is to be waited for: it holds them or will get them."""
        peer = self._peers.get(node)
        if peer is None or not peer.alive or peer.stuck:
            return 0
        return blocks & ~peer.tried & ~(peer.held if self._is_slow(peer) else 0)
