"""Carries out one node's part in a cast: a Session, driven by what its links, watches and clock tell."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from rdmacast.block_reads import BlockReads, Came, Prepare
from rdmacast.cast_report import CastReport, CastTally, lost_blocks
from rdmacast.cast_spec import CastSpec
from rdmacast.connector import Connector
from rdmacast.errors import CastError
from rdmacast.have_map import HaveMap
from rdmacast.pull_report import Verdict
from rdmacast.region import GrowingRegion
from rdmacast.session import Session, SessionState
from rdmacast.session_actions import Action, Ask, Drop, Publish, Pull
from rdmacast.session_settings import SessionSettings
from rdmacast.steering import Steering
from rdmacast.transport import Check
from rdmacast.waiting import wait_to_end
from rdmacast.watches import Watches
from rdmacast.watching import Watcher

logger = logging.getLogger(__name__)

OnBlock = Callable[[int, int], None]
_PUBLISH = Publish()


class Cast:
    """One node's part in `spec`, filling `buffer`.

    `region` is what this node serves over that buffer: blocks are marked there as they come, and those
    that watch it are told. `check(offset, view)` runs in a thread on each block, or on one after the other
    of its pieces of `check_bytes` where the transport gives these, and returns damaged units;
    `on_block(offset, nbytes)` then runs on the event loop, in the order of arrival. `held` are
    blocks that are in the buffer already, and were checked. `prepare(offset, nbytes)` runs in a thread
    before a block is first written to; what it raises ends the cast. All methods belong to the event loop.
    """

    def __init__(
        self,
        spec: CastSpec,
        node: str,
        buffer: memoryview,
        *,
        connector: Connector,
        watcher: Watcher,
        check: Check,
        check_bytes: int | None = None,
        prepare: Prepare | None = None,
        on_block: OnBlock | None = None,
        region: GrowingRegion | None = None,
        held: Iterable[int] = (),
        settings: SessionSettings | None = None,
        executor: Executor | None = None,
    ) -> None:
        if buffer.readonly or buffer.nbytes != spec.nbytes:
            raise ValueError(f"the destination must be {spec.nbytes} writable bytes, not {buffer.nbytes}")
        self._spec = spec
        self._node = spec.node(node)
        self._buffer = buffer.cast("B")
        self._reads = BlockReads(
            spec,
            self._buffer,
            connector=connector,
            check=check,
            check_bytes=check_bytes,
            prepare=prepare,
            executor=executor,
        )
        self._on_block = on_block
        self._region = region
        order = spec.order(self._node) or ()
        self._planned = {block: source for source, block in order}
        self._dues = spec.dues(self._node)
        self._kept = tuple(range(spec.blocks) if self._node in spec.sources else sorted(set(held)))
        self._session = Session(
            blocks=spec.blocks,
            peers=[peer for peer in range(len(spec.members)) if peer != self._node],
            order=order,
            held=self._kept,
            epoch=spec.epoch,
            shift=spec.blocks * self._node // len(spec.members),
            in_turn=bool(self._dues),
            settings=(settings or SessionSettings()).for_links(spec.block_s),
        )
        self._steering = Steering(spec, self._node)
        self._tally = CastTally()
        self._pulls: dict[int, asyncio.Task[Came]] = {}
        self._watches = Watches(spec, watcher, heard=self._heard, steered=self._steered, lost=self._peer_lost)
        self._over: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0
        self._reporting: asyncio.TimerHandle | None = None
        self._began_s = 0.0
        self._ended_s: float | None = None

    def __repr__(self) -> str:
        return f"Cast({self._spec.cast} at {self._name(self._node)}: {self._session!r})"

    async def run(self) -> CastReport:
        """Fill the buffer; to be called once.

        Raises BlocksLost, which names the blocks that nobody can give, and whatever `check` and
        `on_block` raise. What `on_block` heard of stays valid. When this ends, also by cancellation,
        nothing writes into the buffer any more, and no task, timer or connection of the cast is left.
        """
        loop = asyncio.get_running_loop()
        self._began_s, self._over = loop.time(), loop.create_future()
        async with self._reads:
            try:
                self._begin()
                await self._over
            finally:
                self._ended_s = loop.time()
                try:
                    await self._stop()
                finally:
                    self._buffer.release()  # not when this is collected: the caller may unmap it
        if self._session.state is SessionState.FAILED:
            raise lost_blocks(self._spec, self._session.unreachable, self._lost)
        return self.report

    @property
    def report(self) -> CastReport:
        """What was done so far."""
        spec, tally = self._spec, self._tally
        by_url = {member.address.url: member.name for member in spec.members}
        ended_s = self._ended_s
        if ended_s is None:
            ended_s = asyncio.get_running_loop().time() if self._over is not None else self._began_s
        return CastReport(
            cast=spec.cast,
            node=self._name(self._node),
            state=self._session.state.value,
            blocks=spec.blocks,
            held=self._session.have_map.held.bit_count(),
            nbytes=sum(tally.by_peer.values()),
            seconds=ended_s - self._began_s,
            first_block_s=tally.first_block_s,
            last_block_s=tally.last_block_s,
            bytes_by_peer=MappingProxyType(dict(tally.by_peer)),
            bytes_by_transport=MappingProxyType(dict(tally.by_transport)),
            choices=MappingProxyType({by_url[url]: choice for url, choice in self._reads.choices.items()}),
            faults=tally.faults(self._lost),
            slow=self._slow,
        )

    @property
    def _slow(self) -> tuple[str, ...]:
        """Those that may have joined later than this node knows are not among its members."""
        slow, known = self._steering.verdict.slow, len(self._spec.members)
        return tuple(self._name(node) for node in slow if node < known)

    @property
    def _lost(self) -> dict[str, str]:
        """Nodes by name, and why each was lost: what its connection said, or else the session."""
        given_up = {self._name(peer): reason for peer, reason in self._session.given_up.items()}
        return given_up | self._tally.lost

    # Begin and end.

    def _begin(self) -> None:
        if self._region is not None:
            for block in self._kept:
                self._region.mark(*self._spec.extent(block))
        self._publish(self._session.have_map)
        self._step(self._session.start)
        self._report_later()

    async def _stop(self) -> None:
        """Leave nothing under way; on return nobody writes into the buffer any more."""
        assert self._over is not None
        if not self._over.done():
            self._over.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if self._reporting is not None:
            self._reporting.cancel()
        tasks = [*self._pulls.values(), *self._watches.tasks]
        for task in tasks:
            task.cancel()
        if self._session.state is SessionState.RUNNING:
            self._session.cancel()
        self._publish(replace(self._session.have_map, coming=0))
        await wait_to_end(tasks)

    # What happens is told to the session, which says what is to be done.

    def _step(self, event: Callable[[float], list[Action]]) -> None:
        """What goes wrong in here ends the cast."""
        assert self._over is not None
        if self._over.done():
            return
        try:
            actions = event(asyncio.get_running_loop().time())
            for action in actions:
                self._do(action)
            if _PUBLISH in actions:  # once, however often: it tells how all stands now
                self._publish(self._session.have_map)
            self._set_timer()
        except Exception as error:  # whatever it is: `run` waits, and raises it
            self._over.set_exception(error)
            return
        if self._session.state is not SessionState.RUNNING:
            self._over.set_result(None)

    def _do(self, action: Action) -> None:
        match action:
            case Pull():
                task = self._pull(action)
                self._pulls[action.number] = task
                task.add_done_callback(partial(self._pulled, action))
            case Drop():
                logger.info("cast %s: dropping a pull: %s", self._spec.cast, action.reason)
                self._tally.late += action.late
                self._pulls[action.number].cancel()
            case Ask():
                self._watches.ask(action.peer, action.number)
            case Publish():
                pass  # once all else is done

    def _publish(self, told: HaveMap) -> None:
        if self._region is not None:
            self._region.cast(self._spec.block_bytes, told)

    def _set_timer(self) -> None:
        """One timer, for the session's deadline; where that moved away, it is set anew when it is due."""
        deadline_s = self._session.deadline_s
        if self._timer is not None and (deadline_s is None or deadline_s < self._timer_s):
            self._timer.cancel()
            self._timer = None
        if self._timer is None and deadline_s is not None:
            self._timer_s = deadline_s
            self._timer = asyncio.get_running_loop().call_at(deadline_s, self._time_passed)

    def _time_passed(self) -> None:
        self._timer = None
        self._step(self._session.passed)

    # What is heard of others.

    def _heard(self, peer: int, told: HaveMap, answers: int) -> None:
        self._step(lambda now_s: self._session.heard(peer, told, now_s, answers or None))

    def _peer_lost(self, peer: int, reason: CastError, epoch: int | None) -> None:
        logger.warning("cast %s: lost %s: %s", self._spec.cast, self._name(peer), reason)
        self._tally.lost[self._name(peer)] = str(reason)
        self._steering.lost(peer)
        self._step(lambda now_s: self._session.lost(peer, now_s, epoch))

    # Slow nodes.

    def _report_later(self) -> None:
        loop, steering = asyncio.get_running_loop(), self._steering
        if steering.observer is not None and self._session.state is SessionState.RUNNING:
            self._reporting = loop.call_later(steering.every_s, self._report)

    def _report(self) -> None:
        """Tell the observer what pulls took."""
        observer, now_s = self._steering.observer, asyncio.get_running_loop().time()
        if observer is not None:
            self._watches.tell(observer, lambda: self._steering.report(now_s))
        self._report_later()

    def _steered(self, verdict: Verdict) -> None:
        order = self._steering.steered(verdict)
        if order is None:
            return
        logger.warning("cast %s: planning anew around %s", self._spec.cast, ", ".join(self._slow))
        self._planned = {block: source for source, block in order}
        self._step(lambda now_s: self._session.replan(verdict.plan, order, now_s))

    # Pulls.

    def _pull(self, pull: Pull) -> "asyncio.Task[Came]":
        planned = self._session.in_turn and self._planned.get(pull.block) == pull.source
        due = self._dues.get(pull.block) if planned else None
        began = partial(self._began, pull)
        return asyncio.create_task(self._reads.read(pull.block, pull.source, began, due))

    def _began(self, pull: Pull) -> None:
        """The source begins to give the block: it waits for none any more, nor for its turn."""
        self._steering.log.began(pull.number, pull.source, asyncio.get_running_loop().time())
        self._step(lambda now_s: self._session.began(pull.number, now_s))

    def _pulled(self, pull: Pull, task: "asyncio.Task[Came]") -> None:
        del self._pulls[pull.number]
        came = not task.cancelled() and task.exception() is None
        self._steering.log.ended(pull.number, asyncio.get_running_loop().time(), came=came)
        error = None if task.cancelled() else task.exception()
        if task.cancelled():
            self._step(lambda now_s: self._session.failed(pull.number, now_s))
        elif isinstance(error, CastError):
            peer = self._name(pull.source)
            logger.warning("cast %s: block %d of %s: %s", self._spec.cast, pull.block, peer, error)
            self._tally.failed += 1
            self._step(lambda now_s: self._session.failed(pull.number, now_s))
        elif error is not None:
            self._end_with(error)
        elif task.result().units:
            self._damaged(pull, task.result())
        else:
            self._step(partial(self._arrived, pull, task.result().transport))

    def _damaged(self, pull: Pull, came: Came) -> None:
        peer, units = self._name(pull.source), came.units
        logger.warning(
            "cast %s: damaged units %s in block %d from %s", self._spec.cast, units, pull.block, peer
        )
        self._tally.damaged += 1
        self._step(lambda now_s: self._session.damaged(pull.number, now_s))

    def _arrived(self, pull: Pull, transport: str, now_s: float) -> list[Action]:
        offset, nbytes = self._spec.extent(pull.block)
        # Of one that joined later no block has a planned source: it may come from anybody.
        planned = self._planned.get(pull.block, pull.source) == pull.source
        peer, at_s = self._name(pull.source), now_s - self._began_s
        self._tally.came(peer, transport, nbytes, at_s, planned=planned)
        if self._region is not None:
            self._region.mark(offset, nbytes)
        if self._on_block is not None:
            self._on_block(offset, nbytes)
        return self._session.arrived(pull.number, now_s)

    def _end_with(self, error: BaseException) -> None:
        assert self._over is not None
        if not self._over.done():
            self._over.set_exception(error)

    def _name(self, node: int) -> str:
        return self._spec.members[node].name
