"""One node's part in a cast, as a state machine without clock, sockets or steps (pure).

Inputs are what happened and when; each returns what is to be done now. A node pulls its blocks in the
order of its plan. A pull may go out before its planned source holds the block, and waits there: the block
then comes without another question. What its planned source cannot give (lost, slow, damaged) a node pulls
from whoever can, the rarest block first. It never waits for a step of the others.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import reduce
from operator import or_
from types import MappingProxyType

from rdmacast.have_map import HaveMap, bits_of, blocks_in
from rdmacast.pull_under_way import PullsUnderWay, PullUnderWay
from rdmacast.session_actions import Action, Drop, Publish, Pull
from rdmacast.session_peers import Peers
from rdmacast.session_plan import SessionPlan
from rdmacast.session_questions import Questions
from rdmacast.session_settings import SessionSettings
from rdmacast.shares import Shares

FILLING = 5.0  # so many times as long a node waits for its first block, which has the farthest to come
STALE = 2.0  # so many times as long as a pull may take, nobody got a block: none is coming
OVERSLEPT_S = 1.0  # who slept for longer is out of step with the others anyhow
# So many slow pulls long one may take, or wait for its turn at its source, where a quicker node could give
# the block: a single one is slow for many reasons, and planning around slow nodes is the observer's.
LATE = 4.0


class SessionState(Enum):
    RUNNING = "running"  # blocks are missing, and somebody may still have them
    COMPLETE = "complete"  # all blocks are here; goes on serving
    FAILED = "failed"  # `unreachable` names the blocks that nobody can give
    CANCELLED = "cancelled"  # nothing is pulled any more


class Session:
    """`order` is the node's part of the plan: (source, block) in the order to pull; `held` what it kept
    from before; `peers` are the other nodes of the cast, planned sources or not. Where nodes turn from one
    that is lost, each begins with the blocks from its `shift` on. With `in_turn` blocks are pulled one at a
    time in the plan's order, each once its source takes part, until anything goes wrong."""

    def __init__(
        self,
        *,
        blocks: int,
        peers: Iterable[int],
        order: Sequence[tuple[int, int]],
        held: Iterable[int] = (),
        epoch: int = 0,
        shift: int = 0,
        in_turn: bool = False,
        settings: SessionSettings | None = None,
    ) -> None:
        self._settings = settings or SessionSettings()
        self._blocks = blocks
        self._shift = shift
        self._in_turn = in_turn
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
        self._under_way = PullsUnderWay()
        self._shares = Shares()
        self._questions = Questions(timeout_s=self._settings.ask_timeout_s, max_asks=self._settings.max_asks)
        self._given_up: dict[int, str] = {}
        self._patience_s = FILLING * self._settings.patience_s  # for now
        self._idle_since_s: float | None = None  # no pull is under way, though blocks are missing
        self._told: dict[int, int] = {}  # by peer: the blocks, as bits, that it ever told it holds
        self._news_s: float | None = None  # when somebody, or we, got one more
        self._pulls = 0
        self._unreachable = 0
        self._state = SessionState.RUNNING
        self._planned = SessionPlan(blocks)
        self._planned.take(order, self._held)

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
        return HaveMap(blocks=self._blocks, epoch=self._epoch, held=self._held, coming=self._under_way.coming)

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
    def in_turn(self) -> bool:
        """Whether all goes by the plan's steps so far."""
        return self._in_turn

    @property
    def deadline_s(self) -> float | None:
        """When `passed` is to be called if nothing happens before; None if only events can help."""
        if self._state is not SessionState.RUNNING:
            return None
        moments = self._questions.deadlines_s
        moments += [self._limit_s(pull) for pull in self._under_way.values() if pull.is_coming]
        if self._idle_since_s is not None:
            moments.append(self._idle_since_s + self._patience_s)
        return min(moments, default=None)

    def start(self, now_s: float) -> list[Action]:
        self._news_s = now_s
        return self._go_on(now_s)

    def heard(self, peer: int, told: HaveMap, now_s: float, answers: int | None = None) -> list[Action]:
        """A peer told what it holds, by itself or as it `answers` a question.

        A map of another number of blocks is not of this cast.
        """
        if told.blocks != self._blocks:
            return []
        self._peers.heard(peer, told, is_answer=self._questions.answered(peer, answers))
        before = self._told.get(peer, 0)
        if told.held & ~before:
            self._told[peer], self._news_s = before | told.held, now_s
        came = self._came_to(peer, now_s)
        return [*came, *self._go_on(now_s)]

    def began(self, number: int, now_s: float) -> list[Action]:
        """The source begins to give the block."""
        under_way = self._under_way.get(number)
        if under_way is None or under_way.began_s is not None:
            return []
        under_way.began_s, under_way.began = now_s, self._shares.entered(now_s)
        if under_way.held_s is not None:
            return []
        under_way.held_s, self._idle_since_s = now_s, None
        return [Publish()]

    def arrived(self, number: int, now_s: float) -> list[Action]:
        """The block is here and was checked; also of a pull that was dropped."""
        under_way = self._under_way.pop(number)
        took_s = self._ended(under_way, now_s)
        if self._state is SessionState.CANCELLED:
            return []
        self._held |= 1 << under_way.pull.block
        self._news_s = now_s
        self._planned.came(under_way.pull.block)
        self._peers.succeeded(under_way.pull.source, took_s)
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
        in_turn, self._plan, self._in_turn = self._in_turn, number, False
        self._peers.forget_pulls()
        self._planned.take(order, self._held)
        moved = self._under_way.drop_waiting(
            lambda pull: self._planned.source(pull.block) != pull.source,
            "its block is planned from another source",
        )
        if in_turn:  # who would have come before it at its source may never come
            moved += self._under_way.drop(lambda pull: not pull.has_begun, "its turn was by the plan before")
        return [*moved, *self._go_on(now_s)]

    def passed(self, now_s: float) -> list[Action]:
        """Time went by: what took too long is given up."""
        if self._state is not SessionState.RUNNING:
            return []
        self._forgive(now_s)
        actions: list[Action] = []
        for number, under_way in list(self._under_way.items()):
            if under_way.is_coming and now_s >= self._limit_s(under_way):
                actions += self._stalled(number, under_way, now_s)
        late = self._questions.late(now_s)
        silent = [peer for peer in late if self._questions.is_silent(peer)]
        # All silent ones at once: when one is given up, the others' unanswered questions count no more.
        for peer in silent:
            actions += self._give_up(peer, "its source does not answer")
        if not silent:
            actions += [self._questions.ask(peer, now_s) for peer in late]
        if self._idle_since_s is not None and now_s >= self._idle_since_s + self._patience_s:
            actions += self._lose_patience(now_s)
        return [*actions, *self._go_on(now_s)]

    def cancel(self) -> list[Action]:
        """Pull nothing more. What is under way is dropped; the caller waits until its reads have ended."""
        if self._state is SessionState.CANCELLED:
            return []
        self._state = SessionState.CANCELLED
        return self._under_way.drop_all("the cast is cancelled")

    def _came_to(self, peer: int, now_s: float) -> list[Action]:
        """Pulls that waited there need not wait any more."""
        changed = False
        for under_way in self._under_way.values():
            pull = under_way.pull
            if pull.source == peer and under_way.held_s is None and self._peers.gives(peer, pull.block):
                under_way.held_s, changed = now_s, True
        return [Publish()] if changed else []

    def _ended(self, under_way: PullUnderWay, now_s: float) -> float:
        """How long the pull took: what it had of our port."""
        if under_way.began_s is None:
            return now_s - under_way.held_s if under_way.held_s is not None else 0.0
        return self._shares.left(now_s) - under_way.began

    def _limit_s(self, under_way: PullUnderWay) -> float:
        """When a pull has taken too long: sooner where a quicker node could give the block."""
        pull, slow_s = under_way.pull, self._peers.slow_s
        assert under_way.held_s is not None
        since_s = under_way.held_s if under_way.began_s is None else under_way.began_s
        limit_s = since_s + self._settings.pull_timeout_s
        if slow_s is None or not self._peers.has_quick_giver(pull.block, pull.source):
            return limit_s
        if under_way.began_s is None:
            wait = LATE * LATE if self._in_turn else LATE  # in turn a source gives nothing before its step
            return min(limit_s, under_way.held_s + wait * slow_s)
        return min(limit_s, self._shares.reached_s(under_way.began + LATE * slow_s))

    def _forgive(self, now_s: float) -> None:
        """Who slept until long after a pull's time was up has yet to read what came meanwhile."""
        coming = [pull for pull in self._under_way.values() if pull.is_coming]
        late_s = now_s - min((self._limit_s(pull) for pull in coming), default=now_s)
        if not self._settings.least_slow_s < late_s < OVERSLEPT_S:
            return
        for pull in coming:
            assert pull.held_s is not None
            pull.held_s += 2 * late_s
            if pull.began_s is not None:
                pull.began_s += 2 * late_s
                pull.began += 2 * late_s

    def _stalled(self, number: int, under_way: PullUnderWay, now_s: float) -> list[Action]:
        assert under_way.held_s is not None
        pull, age_s = under_way.pull, now_s - under_way.held_s
        under_way.dropped, self._in_turn = True, False
        actions: list[Action] = [Drop(number, f"no block after {age_s:.3g} s", late=True)]
        self._peers.stalled(pull.source)
        if age_s >= self._settings.pull_timeout_s and self._peers.failed(
            pull.source, pull.block, whole_peer=True
        ):
            actions += self._give_up(pull.source, "its source is lost")
        return actions

    def _lose_patience(self, now_s: float) -> list[Action]:
        """Stop waiting for planned sources that do not get what they are to pass on; ask who has what."""
        self._in_turn = False
        for block in blocks_in(self._all & ~self._held):
            source = self._planned.source(block)
            if source is not None and not self._peers.gives(source, block):
                self._peers.stuck(source)
        self._idle_since_s = now_s
        self._patience_s = min(2 * self._patience_s, self._settings.patience_s)
        dropped = self._under_way.drop_waiting(lambda _: True, "its source does not get it")
        return [*dropped, *self._ask(self._peers.alive, now_s)]

    def _ask(self, peers: Iterable[int], now_s: float) -> list[Action]:
        """Those of them that do not owe an answer already."""
        return [self._questions.ask(peer, now_s) for peer in list(peers) if peer not in self._questions]

    def _give_up(self, peer: int, reason: str) -> list[Action]:
        """Nothing is expected of the peer any more."""
        self._peers.lost(peer)
        self._given_up[peer], self._in_turn = reason, False
        self._questions.clear()  # all are asked anew, by those who call this
        dropped = self._under_way.drop(lambda one: one.pull.source == peer, reason)
        return [*dropped, Publish()] if dropped else []

    def _ended_badly(self, number: int, now_s: float, *, whole_peer: bool) -> list[Action]:
        under_way = self._under_way.pop(number)
        self._ended(under_way, now_s)
        self._in_turn = False
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
            self._questions.clear()
            return self._under_way.drop_all("the block is here")
        open_ = self._all & ~self._held & ~self._under_way.busy
        expected = self._planned.expected(open_, self._peers)
        others = open_ & ~expected
        lost = others & ~self._peers.gifts() if others else 0
        unheard = self._peers.unheard if lost else []
        curious = unheard or self._planned.unheard(open_, self._peers)
        actions = self._ask(curious, now_s)
        if lost and not unheard:
            reachable = self._peers.reachable(coming=not self._is_stale(now_s))
            if lost & ~reachable:
                return [*actions, *self._fail(reachable)]
        started = self._pull_more(open_, expected, now_s)
        if self._under_way.coming:
            self._idle_since_s = None
        elif self._idle_since_s is None:
            self._idle_since_s = now_s
        return [*actions, *started]

    def _fail(self, reachable: int) -> list[Action]:
        """Some blocks nobody can give."""
        self._state = SessionState.FAILED
        missing = self._all & ~self._held & ~self._under_way.coming
        self._unreachable = missing & ~reachable  # also what nobody will get now
        self._questions.clear()
        return [*self._under_way.drop_all("the cast has failed"), Publish()]

    def _is_stale(self, now_s: float) -> bool:
        """Whether what is said to be coming to peers should have come long ago."""
        if self._news_s is None or self._under_way.coming:
            return False
        return now_s - self._news_s >= STALE * self._settings.pull_timeout_s

    def _pull_more(self, open_: int, expected: int, now_s: float) -> list[Action]:
        """Of the open blocks, some of which are expected from their planned sources."""
        under_way, coming = self._under_way.counts()
        room = (1 if self._in_turn else self._settings.window) - under_way
        is_idle = not self._in_turn and coming < min(2, self._settings.window)
        if room <= 0 and not is_idle:
            return []
        started: list[Action] = []
        for source, block, is_there in self._next_pulls(open_, expected, room, is_idle):
            self._pulls += 1
            pull = Pull(self._pulls, source, block)
            self._under_way[pull.number] = PullUnderWay(pull, held_s=now_s if is_there else None)
            started.append(pull)
        return [*started, Publish()] if started else []

    def _next_pulls(
        self, open_: int, expected: int, room: int, is_idle: bool
    ) -> Iterator[tuple[int, int, bool]]:
        """(source, block, whether it is there) of so many pulls as there is room for, in the plan's order.

        Where all wait for their sources (`is_idle`), one more that need not wait.
        """
        others = open_ & ~expected
        if others:
            others &= self._peers.gifts()
        there = self._planned.there(open_ & expected, self._peers)
        waits: dict[int, bool] = {}  # by source, whether a pull may wait there
        for block, source in self._planned.pulls:
            if room <= 0 and not (is_idle and (there or others)):
                return
            bit = 1 << block
            if not open_ & bit:
                continue
            if expected & bit and source is not None:
                if source not in waits:
                    waits[source] = self._peers.may_wait_at(source)
                if not there & bit and (room <= 0 or not waits[source]):
                    if self._in_turn:
                        return
                    continue
            elif others:
                source, block = self._replanned(others)
                bit = 1 << block
            else:
                continue
            is_there = bool((there | others) & bit)
            there, others, room, is_idle = there & ~bit, others & ~bit, room - 1, is_idle and not is_there
            yield source, block, is_there

    def _replanned(self, blocks: int) -> tuple[int, int]:
        """The rarest of these blocks that those can give who are best to be asked now, and who gives it."""
        offers = self._peers.offers(blocks, [pull.pull.source for pull in self._under_way.values()])
        rarest = self._peers.rarest(reduce(or_, offers.values()))
        # After a loss several turn to the same givers at once: each begins elsewhere, and passes it on.
        later = rarest >> self._shift << self._shift if self._given_up else 0
        block = next(blocks_in(later or rarest))
        return next(node for node, offered in offers.items() if offered >> block & 1), block
