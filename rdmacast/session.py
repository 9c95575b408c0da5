"""One node's part in a cast, as a state machine without clock, sockets or steps (pure).

Inputs are what happened and when; each returns what is to be done now. A node pulls its blocks in the
order of its plan, each as soon as its planned source holds it. What its planned source cannot give (lost,
slow, damaged) it pulls from whoever can, the rarest block first. It never waits for a step of the others.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import reduce
from operator import or_
from types import MappingProxyType

from rdmacast.have_map import HaveMap, bits_of, blocks_in
from rdmacast.session_peers import Peers
from rdmacast.session_settings import SessionSettings


class SessionState(Enum):
    RUNNING = "running"  # blocks are missing, and somebody may still have them
    COMPLETE = "complete"  # all blocks are here; goes on serving
    FAILED = "failed"  # `unreachable` names the blocks that nobody can give
    CANCELLED = "cancelled"  # nothing is pulled any more


@dataclass(frozen=True, slots=True)
class Pull:
    """Read the block from the source and check it; then tell `arrived`, `damaged` or `failed`."""

    number: int
    source: int
    block: int


@dataclass(frozen=True, slots=True)
class Drop:
    """End the pull's read. Until one of the three is told of it, its block is not pulled again: a read
    may still write into it. `late`: it took too long."""

    number: int
    reason: str
    late: bool = False


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask the peer what it holds; its answer goes to `heard`, with the number of the question."""

    peer: int
    number: int


@dataclass(frozen=True, slots=True)
class Publish:
    """Tell the peers what we hold: `have_map` has changed."""


Action = Pull | Drop | Ask | Publish


@dataclass(frozen=True, slots=True)
class _Question:
    number: int
    asks: int  # of this peer without an answer
    deadline_s: float


@dataclass(slots=True)
class _UnderWay:
    pull: Pull
    started_s: float
    dropped: bool = False
    sharing: int = 1  # the most pulls under way at once, itself among them: they share the port


class Session:
    """`order` is the node's part of the plan: (source, block) in the order to pull; `held` what it kept
    from before; `peers` are the other nodes of the cast, planned sources or not. Where nodes turn from one
    that is lost, each begins with the blocks from its `shift` on."""

    def __init__(
        self,
        *,
        blocks: int,
        peers: Iterable[int],
        order: Sequence[tuple[int, int]],
        held: Iterable[int] = (),
        epoch: int = 0,
        shift: int = 0,
        settings: SessionSettings | None = None,
    ) -> None:
        self._settings = settings or SessionSettings()
        self._blocks = blocks
        self._shift = shift
        self._all = (1 << blocks) - 1
        self._held = bits_of(held) & self._all
        self._epoch = epoch
        self._plan = 0
        self._peers = Peers(
            peers,
            max_tries=self._settings.max_tries,
            max_failures=self._settings.max_failures,
            least_slow_s=self._settings.least_slow_s,
        )
        self._under_way: dict[int, _UnderWay] = {}
        self._asked: dict[int, _Question] = {}  # by peer: the latest question, if it has no answer
        self._given_up: dict[int, str] = {}
        self._questions = 0
        self._patience_s = self._settings.patience_s  # for now
        self._idle_since_s: float | None = None  # no pull is under way, though blocks are missing
        self._pulls = 0
        self._unreachable = 0
        self._state = SessionState.RUNNING
        self._order: dict[int, int | None] = {}
        self._planned_of: dict[int, int] = {}  # by source: the blocks planned from it, as bits
        self._take(order)

    def __repr__(self) -> str:
        return (
            f"Session({self._state.value}: {self._held.bit_count()} of {self._blocks} blocks, "
            f"{len(self._under_way)} under way, epoch {self._epoch})"
        )

    @property
    def state(self) -> SessionState:
        return self._state

    @property
    def have_map(self) -> HaveMap:
        return HaveMap(blocks=self._blocks, epoch=self._epoch, held=self._held, coming=self._coming)

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(blocks_in(self._all & ~self._held))

    @property
    def unreachable(self) -> tuple[int, ...]:
        """Once failed: the blocks that nobody can give."""
        return tuple(blocks_in(self._unreachable))

    @property
    def given_up(self) -> Mapping[int, str]:
        """Peers of which nothing was expected any more at some time, and why the last time."""
        return MappingProxyType(self._given_up)

    @property
    def deadline_s(self) -> float | None:
        """When `passed` is to be called if nothing happens before; None if only events can help."""
        if self._state is not SessionState.RUNNING:
            return None
        moments = [question.deadline_s for question in self._asked.values()]
        moments += [self._limit_s(pull) for pull in self._under_way.values() if not pull.dropped]
        if self._idle_since_s is not None:
            moments.append(self._idle_since_s + self._patience_s)
        return min(moments, default=None)

    def start(self, now_s: float) -> list[Action]:
        return self._go_on(now_s)

    def heard(self, peer: int, told: HaveMap, now_s: float, answers: int | None = None) -> list[Action]:
        """A peer told what it holds, by itself or as it `answers` a question.

        A map of another number of blocks is not of this cast.
        """
        if told.blocks != self._blocks:
            return []
        # An answer to a question from before somebody was lost may be from before that, too.
        asked = self._asked.get(peer)
        is_answer = asked is not None and asked.number == answers
        if is_answer:
            del self._asked[peer]
        self._peers.heard(peer, told, is_answer=is_answer)
        return self._go_on(now_s)

    def arrived(self, number: int, now_s: float) -> list[Action]:
        """The block is here and was checked; also of a pull that was dropped."""
        under_way = self._under_way.pop(number)
        if self._state is SessionState.CANCELLED:
            return []
        self._held |= 1 << under_way.pull.block
        self._order.pop(under_way.pull.block, None)
        self._peers.succeeded(under_way.pull.source, (now_s - under_way.started_s) / under_way.sharing)
        self._patience_s = self._peers.patience_s(self._settings.patience_s)
        return [Publish(), *self._go_on(now_s)]

    def damaged(self, number: int, now_s: float) -> list[Action]:
        """The block came, but not as it should be."""
        return self._ended_badly(number, now_s, whole_peer=False)

    def failed(self, number: int, now_s: float) -> list[Action]:
        """The read ended without the block, because it was dropped or by itself."""
        return self._ended_badly(number, now_s, whole_peer=not self._under_way[number].dropped)

    def lost(self, peer: int, now_s: float, epoch: int | None = None) -> list[Action]:
        """A peer is gone; with `epoch`, its life up to that one: it may be back already.

        It comes back with a map of a later epoch.
        """
        if epoch is not None and self._peers.is_newer(peer, epoch):
            return []
        return [*self._give_up(peer, "its source is lost"), *self._go_on(now_s)]

    def replan(self, number: int, order: Sequence[tuple[int, int]], now_s: float) -> list[Action]:
        """A plan for what is missing; one that is not of a higher number than the last is ignored."""
        if number <= self._plan:
            return []
        self._plan = number
        self._peers.forget_pulls()
        self._take(order)
        return self._go_on(now_s)

    def passed(self, now_s: float) -> list[Action]:
        """Time went by: what took too long is given up."""
        if self._state is not SessionState.RUNNING:
            return []
        actions: list[Action] = []
        for number, under_way in list(self._under_way.items()):
            if not under_way.dropped and now_s >= self._limit_s(under_way):
                actions += self._stalled(number, under_way, now_s)
        late = [peer for peer, question in self._asked.items() if question.deadline_s <= now_s]
        silent = [peer for peer in late if self._asked[peer].asks >= self._settings.max_asks]
        # All silent ones at once: when one is given up, the others' unanswered questions count no more.
        for peer in silent:
            actions += self._give_up(peer, "its source does not answer")
        if not silent:
            actions += [self._ask(peer, now_s) for peer in late]
        if self._idle_since_s is not None and now_s >= self._idle_since_s + self._patience_s:
            actions += self._lose_patience(now_s)
        return [*actions, *self._go_on(now_s)]

    def cancel(self) -> list[Action]:
        """Pull nothing more. What is under way is dropped; the caller waits until its reads have ended."""
        if self._state is SessionState.CANCELLED:
            return []
        self._state = SessionState.CANCELLED
        return self._drop_all("the cast is cancelled")

    @property
    def _coming(self) -> int:
        return bits_of(pull.pull.block for pull in self._under_way.values() if not pull.dropped)

    @property
    def _busy(self) -> int:
        """Blocks that a read may write into."""
        return bits_of(pull.pull.block for pull in self._under_way.values())

    def _take(self, order: Sequence[tuple[int, int]]) -> None:
        """The planned source of each missing block, in the order to pull; blocks without one come last."""
        planned: dict[int, int | None] = {
            block: source for source, block in order if 0 <= block < self._blocks
        }
        planned.update((block, None) for block in range(self._blocks) if block not in planned)
        self._order = {block: source for block, source in planned.items() if not self._held >> block & 1}
        self._planned_of = {}
        for block, source in self._order.items():
            if source is not None:
                self._planned_of[source] = self._planned_of.get(source, 0) | 1 << block

    def _limit_s(self, under_way: _UnderWay) -> float:
        """When a pull has taken too long: twice the usual where a quicker node could give the block."""
        pull, slow_s = under_way.pull, self._peers.slow_s
        limit_s = self._settings.pull_timeout_s
        if slow_s is not None:
            slow_s *= under_way.sharing
        if slow_s is not None and slow_s < limit_s and self._peers.has_quick_giver(pull.block, pull.source):
            limit_s = slow_s
        return under_way.started_s + limit_s

    def _stalled(self, number: int, under_way: _UnderWay, now_s: float) -> list[Action]:
        pull, age_s = under_way.pull, now_s - under_way.started_s
        under_way.dropped = True
        actions: list[Action] = [Drop(number, f"no block after {age_s:.3g} s", late=True)]
        self._peers.stalled(pull.source)
        if now_s >= under_way.started_s + self._settings.pull_timeout_s and self._peers.failed(
            pull.source, pull.block, whole_peer=True
        ):
            actions += self._give_up(pull.source, "its source is lost")
        return actions

    def _lose_patience(self, now_s: float) -> list[Action]:
        """Stop waiting for planned sources that do not get what they are to pass on; ask who has what."""
        for block in blocks_in(self._all & ~self._held):
            source = self._order[block]
            if source is not None and not self._peers.gives(source, block):
                self._peers.stuck(source)
        self._idle_since_s = now_s
        self._patience_s = min(2 * self._patience_s, self._settings.patience_s)
        return [self._ask(peer, now_s) for peer in list(self._peers.alive) if peer not in self._asked]

    def _ask(self, peer: int, now_s: float) -> Ask:
        before = self._asked.get(peer)
        self._questions += 1
        self._asked[peer] = _Question(
            number=self._questions,
            asks=1 if before is None else before.asks + 1,
            deadline_s=now_s + self._settings.ask_timeout_s,
        )
        return Ask(peer, self._questions)

    def _give_up(self, peer: int, reason: str) -> list[Action]:
        """Nothing is expected of the peer any more."""
        self._peers.lost(peer)
        self._given_up[peer] = reason
        self._asked.clear()  # all are asked anew, by those who call this
        dropped: list[Action] = []
        for number, under_way in self._under_way.items():
            if under_way.pull.source == peer and not under_way.dropped:
                under_way.dropped = True
                dropped.append(Drop(number, reason))
        return [*dropped, Publish()] if dropped else []

    def _drop_all(self, reason: str) -> list[Action]:
        left = [(number, pull) for number, pull in self._under_way.items() if not pull.dropped]
        for _, pull in left:
            pull.dropped = True
        return [Drop(number, reason) for number, _ in left]

    def _ended_badly(self, number: int, now_s: float, *, whole_peer: bool) -> list[Action]:
        under_way = self._under_way.pop(number)
        if self._state is not SessionState.RUNNING:
            return []
        actions: list[Action] = [Publish()]
        pull = under_way.pull
        if not under_way.dropped and self._peers.failed(pull.source, pull.block, whole_peer=whole_peer):
            actions += self._give_up(pull.source, "its source failed too often")
        return [*actions, *self._go_on(now_s)]

    def _go_on(self, now_s: float) -> list[Action]:
        """Whatever follows from what is known now."""
        if self._state is not SessionState.RUNNING:
            return []
        if self._held == self._all:
            self._state = SessionState.COMPLETE
            self._asked.clear()
            return self._drop_all("the block is here")
        open_ = self._all & ~self._held & ~self._busy
        lost = open_ & ~self._expected(open_) & ~self._peers.gifts()
        unheard = self._peers.unheard if lost else []
        curious = unheard or self._planned_unheard(open_)
        actions: list[Action] = [self._ask(peer, now_s) for peer in curious if peer not in self._asked]
        lacking = 0 if unheard else lost & ~self._peers.reachable()
        if lacking:
            self._state = SessionState.FAILED
            self._unreachable = open_ & ~self._peers.reachable()  # also what nobody will get now
            self._asked.clear()
            return [*actions, *self._drop_all("the cast has failed"), Publish()]
        started = self._pull_more(now_s)
        if self._coming:
            self._idle_since_s = None
        elif self._idle_since_s is None:
            self._idle_since_s = now_s
        return [*actions, *started]

    def _expected(self, blocks: int) -> int:
        """Those of the blocks, as bits, for which their planned source is to be waited for."""
        bits = 0
        for source, planned in self._planned_of.items():
            if planned & blocks:
                bits |= self._peers.expected(source, planned & blocks)
        return bits

    def _planned_unheard(self, blocks: int) -> list[int]:
        """Planned sources of these blocks that have not told what they hold."""
        sources = [source for source, planned in self._planned_of.items() if planned & blocks]
        return sorted(source for source in sources if self._peers.is_unheard(source))

    def _pull_more(self, now_s: float) -> list[Action]:
        started: list[Action] = []
        room = self._settings.window - self._coming.bit_count()
        if room <= 0:
            return []
        open_ = self._all & ~self._held & ~self._busy
        expected = self._expected(open_)
        planned = 0
        for source, blocks in self._planned_of.items():
            planned |= blocks & expected & self._peers.gift(source)
        others = open_ & ~expected & self._peers.gifts()
        while room > 0 and (planned or others):
            source, block = self._planned(planned) if planned else self._replanned(others)
            planned, others = planned & ~(1 << block), others & ~(1 << block)
            self._pulls += 1
            room -= 1
            pull = Pull(self._pulls, source, block)
            self._under_way[pull.number] = _UnderWay(pull, now_s)
            for other in self._under_way.values():
                other.sharing = max(other.sharing, len(self._under_way))
            started.append(pull)
        return [*started, Publish()] if started else []

    def _planned(self, blocks: int) -> tuple[int, int]:
        """The first in the plan of these blocks, and its source."""
        for block, source in self._order.items():
            if blocks >> block & 1 and source is not None:
                return source, block
        raise AssertionError("a planned block is not in the plan")

    def _replanned(self, blocks: int) -> tuple[int, int]:
        """The rarest of these blocks that those can give who are best to be asked now, and who gives it."""
        offers = self._peers.offers(blocks, [pull.pull.source for pull in self._under_way.values()])
        rarest = self._peers.rarest(reduce(or_, offers.values()))
        # After a loss several turn to the same givers at once: each begins elsewhere, and passes it on.
        later = rarest >> self._shift << self._shift if self._given_up else 0
        block = next(blocks_in(later or rarest))
        return next(node for node, offered in offers.items() if offered >> block & 1), block
