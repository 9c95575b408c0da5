"""One node's part in a cast, as a state machine without clock, sockets or steps (pure).

Inputs are events and their times; each returns the actions to take now. A node pulls its blocks in the
order of its plan. A pull may be sent before its planned source holds the block, and waits there: the block
then arrives without another request. Blocks that the planned source cannot serve (lost, slow, damaged) are
pulled from any other holder, the rarest block first. It never waits for a step of the others.

Nodes that are slow are found by the straggler detector, whose verdict leads to `replan`. The session itself
drops only pulls of nodes that are silent: dead, hung, or without what they are to pass on.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import reduce
from math import inf
from operator import or_
from types import MappingProxyType

from rdmacast.bitfield import Bitfield, blocks_in, to_bits
from rdmacast.cast.have_requests import HaveRequests
from rdmacast.cast.pending_pulls import PendingPull, PendingPulls
from rdmacast.cast.session_actions import Action, DropPull, PublishBitfield, StartPull
from rdmacast.cast.session_peers import Peers
from rdmacast.cast.session_plan import SessionPlan
from rdmacast.cast.session_settings import SILENCE_FACTOR, SessionSettings

FIRST_BLOCK_FACTOR = 5.0  # times the patience for the first block, which has the longest path
STALE_FACTOR = 2.0  # times a pull's timeout without a block at any node: none is pending
SLOT_FACTOR = 4.0  # times the silence, in slots: a source sends nothing before its slot
MIN_TIMER_LAG_S, MAX_TIMER_LAG_S = 0.05, 1.0  # a node that was suspended for longer is out of step anyway


class SessionState(Enum):
    RUNNING = "running"  # blocks are missing, and some node may still have them
    COMPLETE = "complete"  # all blocks are here; still serving
    FAILED = "failed"  # `unreachable` has the blocks that no node can serve
    CANCELLED = "cancelled"  # nothing is pulled any more


class Session:
    """The session of one node.

    `order` is the node's part of the plan: (source, block) in the order to pull; `held` are blocks kept
    from before; `peers` are the other nodes of the cast, planned sources or not, of which those `near` are
    under its leaf switch. After a loss each node begins with the blocks from its `shift` on. With `in_slots`
    blocks are pulled one at a time in the plan's order, each once its source takes part, until the first
    fault.
    """

    def __init__(
        self,
        *,
        blocks: int,
        peers: Iterable[int],
        order: Sequence[tuple[int, int]],
        held: Iterable[int] = (),
        epoch: int = 0,
        shift: int = 0,
        near: frozenset[int] = frozenset(),
        in_slots: bool = False,
        settings: SessionSettings | None = None,
    ) -> None:
        self._settings = settings or SessionSettings()
        self._blocks = blocks
        self._shift = shift
        self._in_slots = in_slots
        self._all = (1 << blocks) - 1
        self._held = to_bits(held) & self._all
        self._epoch = epoch
        self._plan = 0
        self._peers = Peers(
            peers,
            max_tries=self._settings.max_tries,
            max_failures=self._settings.max_failures,
            near=near,
        )
        self._pulls_pending = PendingPulls()
        self._have_requests = HaveRequests(
            timeout_s=self._settings.ask_timeout_s, max_attempts=self._settings.max_asks
        )
        self._lost_peers: dict[int, str] = {}
        self._patience_s = FIRST_BLOCK_FACTOR * self._settings.patience_s  # for now
        self._idle_since_s: float | None = None  # no pull is under way, though blocks are missing
        self._reported: dict[int, int] = {}  # by peer: the blocks, as bits, that it ever reported
        self._last_gain_s: float | None = None  # when any node last gained a block
        self._longest_s: float | None = None  # of the pulls that brought a block
        self._pull_count = 0
        self._unreachable = 0
        self._state = SessionState.RUNNING
        self._planned = SessionPlan(blocks)
        self._planned.load(order, self._held)

    def __repr__(self) -> str:
        return (
            f"Session({self._state.value}: {self._held.bit_count()} of {self._blocks} blocks, "
            f"{len(self._pulls_pending)} under way, epoch {self._epoch})"
        )

    @property
    def state(self) -> SessionState:
        return self._state

    @property
    def bitfield(self) -> Bitfield:
        return Bitfield(
            blocks=self._blocks, epoch=self._epoch, held=self._held, pending=self._pulls_pending.pending
        )

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(blocks_in(self._all & ~self._held))

    @property
    def unreachable(self) -> tuple[int, ...]:
        """The blocks that no node can serve, once failed."""
        return tuple(blocks_in(self._unreachable))

    @property
    def lost_peers(self) -> Mapping[int, str]:
        """Peers that were dropped at some time, and why the last time."""
        return MappingProxyType(self._lost_peers)

    @property
    def in_slots(self) -> bool:
        """Whether blocks are still pulled in the slots of the plan."""
        return self._in_slots

    @property
    def deadline_s(self) -> float | None:
        """When to call `on_timer` if no event is earlier; None if only events can help."""
        if self._state is not SessionState.RUNNING:
            return None
        moments = self._have_requests.deadlines_s
        moments += [self._limit_s(pull) for pull in self._pulls_pending.values() if pull.is_pending]
        if self._idle_since_s is not None:
            moments.append(self._idle_since_s + self._patience_s)
        return min(moments, default=None)

    def presume(self, holders: Iterable[int]) -> None:
        """Take these peers to hold every block, before the start."""
        self._peers.presume(holders, self._all)

    def start(self, now_s: float) -> list[Action]:
        self._last_gain_s = now_s
        return self._advance(now_s)

    def on_bitfield(
        self, peer: int, reported: Bitfield, now_s: float, answers: int | None = None
    ) -> list[Action]:
        """Handle a peer's bitfield, sent by itself or as the reply to the HAVE request `answers`.

        A bitfield of another number of blocks is not of this cast.
        """
        if reported.blocks != self._blocks:
            return []
        self._peers.on_bitfield(peer, reported, is_answer=self._have_requests.on_reply(peer, answers))
        before = self._reported.get(peer, 0)
        if reported.held & ~before:
            self._reported[peer], self._last_gain_s = before | reported.held, now_s
        remove = self._mark_available(peer, now_s)
        return [*remove, *self._advance(now_s)]

    def on_started(self, number: int, now_s: float) -> list[Action]:
        """Handle the first byte of a block."""
        under_way = self._pulls_pending.get(number)
        if under_way is None or under_way.started_s is not None:
            return []
        under_way.started_s = now_s
        if under_way.held_s is not None:
            return []
        under_way.held_s, self._idle_since_s = now_s, None
        return [PublishBitfield()]

    def on_arrived(self, number: int, now_s: float) -> list[Action]:
        """Handle a block that arrived and was checked; also of a pull that was dropped."""
        under_way = self._pulls_pending.pop(number)
        if self._state is SessionState.CANCELLED:
            return []
        self._held |= 1 << under_way.pull.block
        self._last_gain_s = now_s
        self._planned.remove(under_way.pull.block)
        self._peers.on_success(under_way.pull.source)
        if under_way.is_pending and under_way.since_s is not None:
            self._longest_s = max(self._longest_s or 0.0, now_s - under_way.since_s)
        self._patience_s = min(self._settings.patience_s, self._silence_s)
        return [PublishBitfield(), *self._advance(now_s)]

    def on_damaged(self, number: int, now_s: float) -> list[Action]:
        """Handle a block that failed its checks."""
        return self._on_bad_end(number, now_s, whole_peer=False)

    def on_failed(self, number: int, now_s: float) -> list[Action]:
        """Handle a read that ended without the block, dropped or failed."""
        return self._on_bad_end(number, now_s, whole_peer=not self._pulls_pending[number].dropped)

    def on_lost(self, peer: int, now_s: float, epoch: int | None = None) -> list[Action]:
        """Handle the loss of a peer; with `epoch` only its life up to that epoch: it may be back already.

        It returns with a bitfield of a later epoch.
        """
        if epoch is not None and self._peers.is_newer(peer, epoch):
            return []
        return [*self._drop_peer(peer, "its source is lost"), *self._advance(now_s)]

    def replan(self, number: int, order: Sequence[tuple[int, int]], now_s: float) -> list[Action]:
        """Follow a new plan for the missing blocks; one whose number is not higher is ignored."""
        if number <= self._plan:
            return []
        in_slots, self._plan, self._in_slots = self._in_slots, number, False
        self._peers.forget_stalls()
        self._planned.load(order, self._held)
        moved = self._pulls_pending.drop_waiting(
            lambda pull: self._planned.source(pull.block) != pull.source,
            "its block is planned from another source",
        )
        if in_slots:  # earlier slots at its source may never be used
            moved += self._pulls_pending.drop(
                lambda pull: not pull.has_started, "its slot was of the plan before"
            )
        return [*moved, *self._advance(now_s)]

    def on_timer(self, now_s: float) -> list[Action]:
        """Handle the deadline: pulls and requests that took too long are dropped."""
        if self._state is not SessionState.RUNNING:
            return []
        self._extend_deadlines(now_s)
        actions: list[Action] = []
        for number, under_way in list(self._pulls_pending.items()):
            if under_way.is_pending and now_s >= self._limit_s(under_way):
                actions += self._stalled(number, under_way, now_s)
        overdue = self._have_requests.overdue(now_s)
        silent = [peer for peer in overdue if self._have_requests.is_exhausted(peer)]
        # All silent ones at once: dropping one clears the requests to the others.
        for peer in silent:
            actions += self._drop_peer(peer, "its source does not answer")
        if not silent:
            actions += [self._have_requests.request(peer, now_s) for peer in overdue]
        if self._idle_since_s is not None and now_s >= self._idle_since_s + self._patience_s:
            actions += self._on_idle_timeout(now_s)
        return [*actions, *self._advance(now_s)]

    def cancel(self) -> list[Action]:
        """Drop all pulls and start no more; the caller waits until their reads have ended."""
        if self._state is SessionState.CANCELLED:
            return []
        self._state = SessionState.CANCELLED
        return self._pulls_pending.drop_all("the cast is cancelled")

    def _mark_available(self, peer: int, now_s: float) -> list[Action]:
        """Mark pulls that waited for blocks which the peer now holds."""
        changed = False
        for under_way in self._pulls_pending.values():
            pull = under_way.pull
            if pull.source == peer and under_way.held_s is None and self._peers.can_serve(peer, pull.block):
                under_way.held_s, changed = now_s, True
        return [PublishBitfield()] if changed else []

    def _limit_s(self, under_way: PendingPull) -> float:
        """Return when a pull has stalled: sooner if another node could serve the block."""
        assert under_way.since_s is not None
        pull, timeout_s = under_way.pull, self._settings.pull_timeout_s
        if self._peers.has_other_source(pull.block, pull.source):
            factor = SLOT_FACTOR if self._in_slots and not under_way.has_started else 1.0
            timeout_s = min(timeout_s, factor * self._silence_s)
        return under_way.since_s + timeout_s

    @property
    def _silence_s(self) -> float:
        """The time after which a node that sends no block is left for others."""
        if self._longest_s is None:
            return inf
        return max(self._settings.min_silence_s, SILENCE_FACTOR * self._longest_s)

    def _extend_deadlines(self, now_s: float) -> None:
        """Extend the deadlines after a late timer: what arrived meanwhile is unread."""
        pending = [pull for pull in self._pulls_pending.values() if pull.is_pending]
        late_s = now_s - min((self._limit_s(pull) for pull in pending), default=now_s)
        if not MIN_TIMER_LAG_S < late_s < MAX_TIMER_LAG_S:
            return
        for pull in pending:
            assert pull.held_s is not None
            pull.held_s += 2 * late_s
            if pull.started_s is not None:
                pull.started_s += 2 * late_s

    def _stalled(self, number: int, under_way: PendingPull, now_s: float) -> list[Action]:
        assert under_way.held_s is not None
        pull, age_s = under_way.pull, now_s - under_way.held_s
        under_way.dropped, self._in_slots = True, False
        reason = f"no block after {age_s:.3g} s"
        actions: list[Action] = [DropPull(number, reason, late=True)]
        self._peers.mark_stalled(pull.source)
        if age_s >= self._settings.pull_timeout_s and self._peers.on_failure(
            pull.source, pull.block, whole_peer=True
        ):
            actions += self._drop_peer(pull.source, reason)
        return actions

    def _on_idle_timeout(self, now_s: float) -> list[Action]:
        """Stop waiting for planned sources that do not get what they are to pass on; request bitfields."""
        self._in_slots = False
        for block in blocks_in(self._all & ~self._held):
            source = self._planned.source(block)
            if source is not None and not self._peers.can_serve(source, block):
                self._peers.mark_stuck(source)
        self._idle_since_s = now_s
        self._patience_s = min(2 * self._patience_s, self._settings.patience_s)
        dropped = self._pulls_pending.drop_waiting(lambda _: True, "its source does not get it")
        return [*dropped, *self._request_have(self._peers.alive, now_s)]

    def _request_have(self, peers: Iterable[int], now_s: float) -> list[Action]:
        """Request bitfields from those peers that have no request pending."""
        return [
            self._have_requests.request(peer, now_s)
            for peer in list(peers)
            if peer not in self._have_requests
        ]

    def _drop_peer(self, peer: int, reason: str) -> list[Action]:
        """Expect nothing of the peer any more."""
        self._peers.mark_lost(peer)
        self._lost_peers[peer], self._in_slots = reason, False
        self._have_requests.clear()  # the callers request all bitfields again
        dropped = self._pulls_pending.drop(lambda one: one.pull.source == peer, reason)
        return [*dropped, PublishBitfield()] if dropped else []

    def _on_bad_end(self, number: int, now_s: float, *, whole_peer: bool) -> list[Action]:
        under_way = self._pulls_pending.pop(number)
        self._in_slots = False
        if self._state is not SessionState.RUNNING:
            return []
        actions: list[Action] = [PublishBitfield()]
        pull = under_way.pull
        if not under_way.dropped and self._peers.on_failure(pull.source, pull.block, whole_peer=whole_peer):
            actions += self._drop_peer(pull.source, "its source failed too often")
        return [*actions, *self._advance(now_s)]

    def _advance(self, now_s: float) -> list[Action]:
        """Return the actions that follow from the current state."""
        if self._state is not SessionState.RUNNING:
            return []
        if self._held == self._all:
            self._state = SessionState.COMPLETE
            self._have_requests.clear()
            return self._pulls_pending.drop_all("the block is here")
        open_ = self._all & ~self._held & ~self._pulls_pending.busy
        expected = self._planned.expected(open_, self._peers)
        others = open_ & ~expected
        on_lost = others & ~self._peers.all_servable() if others else 0
        unreported = self._peers.unreported if on_lost else []
        requested = unreported or self._planned.unreported(open_, self._peers)
        actions = self._request_have(requested, now_s)
        if on_lost and not unreported:
            reachable = self._peers.reachable(pending=not self._is_stale(now_s))
            if on_lost & ~reachable:
                return [*actions, *self._fail(reachable)]
        started = self._pull_more(open_, expected, now_s)
        if self._pulls_pending.pending:
            self._idle_since_s = None
        elif self._idle_since_s is None:
            self._idle_since_s = now_s
        return [*actions, *started]

    def _fail(self, reachable: int) -> list[Action]:
        """Fail: some blocks cannot be served by any node."""
        self._state = SessionState.FAILED
        missing = self._all & ~self._held & ~self._pulls_pending.pending
        self._unreachable = missing & ~reachable  # also what no node will get now
        self._have_requests.clear()
        return [*self._pulls_pending.drop_all("the cast has failed"), PublishBitfield()]

    def _is_stale(self, now_s: float) -> bool:
        """Return whether the blocks pending at peers should have arrived long ago."""
        if self._last_gain_s is None or self._pulls_pending.pending:
            return False
        return now_s - self._last_gain_s >= STALE_FACTOR * self._settings.pull_timeout_s

    def _pull_more(self, open_: int, expected: int, now_s: float) -> list[Action]:
        """Start pulls of open blocks, some of which are expected from their planned sources."""
        under_way, pending = self._pulls_pending.counts()
        room = (1 if self._in_slots else self._settings.window) - under_way
        is_idle = not self._in_slots and pending < min(2, self._settings.window)
        if room <= 0 and not is_idle:
            return []
        started: list[Action] = []
        for source, block, is_there in self._next_pulls(open_, expected, room, is_idle):
            self._pull_count += 1
            pull = StartPull(self._pull_count, source, block)
            self._pulls_pending[pull.number] = PendingPull(pull, held_s=now_s if is_there else None)
            started.append(pull)
        return [*started, PublishBitfield()] if started else []

    def _next_pulls(
        self, open_: int, expected: int, room: int, is_idle: bool
    ) -> Iterator[tuple[int, int, bool]]:
        """Yield (source, block, whether it is available) for up to `room` pulls, in the plan's order.

        Where all pulls wait for their sources (`is_idle`), one more that need not wait is added.
        """
        others = open_ & ~expected
        if others:
            others &= self._peers.all_servable()
        available = self._planned.available(open_ & expected, self._peers)
        waits: dict[int, bool] = {}  # by source, whether a pull may wait there
        for block, source in self._planned.pulls:
            if room <= 0 and not (is_idle and (available or others)):
                return
            bit = 1 << block
            if not open_ & bit:
                continue
            if expected & bit and source is not None:
                if source not in waits:
                    waits[source] = self._peers.may_wait_at(source)
                if not available & bit and (room <= 0 or not waits[source]):
                    if self._in_slots:
                        return
                    continue
            elif others:
                source, block = self._replanned(others)
                bit = 1 << block
            else:
                continue
            is_there = bool((available | others) & bit)
            available, others, room, is_idle = (
                available & ~bit,
                others & ~bit,
                room - 1,
                is_idle and not is_there,
            )
            yield source, block, is_there

    def _replanned(self, blocks: int) -> tuple[int, int]:
        """Return the rarest of the blocks that the best sources hold, and the source."""
        best_sources = self._peers.best_sources(
            blocks, [pull.pull.source for pull in self._pulls_pending.values()]
        )
        rarest = self._peers.rarest(reduce(or_, best_sources.values()))
        # After a loss several nodes pull from the same sources: each begins elsewhere, and passes blocks on.
        later = rarest >> self._shift << self._shift if self._lost_peers else 0
        block = next(blocks_in(later or rarest))
        return next(node for node, offered in best_sources.items() if offered >> block & 1), block
