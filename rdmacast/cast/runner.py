"""Runs one node's part in a cast: a Session, driven by events of links, watches and the clock."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from rdmacast.aio.shielded import join_shielded
from rdmacast.bitfield import Bitfield
from rdmacast.cast.block_reads import BlockReads, ReceivedBlock
from rdmacast.cast.hooks import BlockHooks
from rdmacast.cast.links import CastLinks
from rdmacast.cast.replanner import Replanner
from rdmacast.cast.report import CastReport, CastTally, lost_blocks
from rdmacast.cast.session import Session, SessionState
from rdmacast.cast.session_actions import Action, DropPull, PublishBitfield, RequestHave, StartPull
from rdmacast.cast.session_settings import SessionSettings
from rdmacast.cast.spec import CastSpec
from rdmacast.cast.watches import Watches
from rdmacast.destination import BlockMemory, BufferMemory
from rdmacast.errors import CastError, PeerUnreachable
from rdmacast.protocol.pull_report import StragglerVerdict
from rdmacast.server.region import GrowingRegion

logger = logging.getLogger(__name__)

_PUBLISH = PublishBitfield()


class Cast:
    """One node's part in `spec`, which fills `memory`, or a buffer.

    `region` is what this node serves of that memory: blocks are marked there as they arrive, and its
    bitfield is published. `held` are checked blocks that are in their place already. All methods
    belong to the event loop's thread.
    """

    def __init__(
        self,
        spec: CastSpec,
        node: str,
        memory: BlockMemory | memoryview,
        *,
        links: CastLinks,
        hooks: BlockHooks,
        region: GrowingRegion | None = None,
        held: Iterable[int] = (),
        settings: SessionSettings | None = None,
    ) -> None:
        self._memory = BufferMemory(memory) if isinstance(memory, memoryview) else memory
        if self._memory.nbytes != spec.plan.nbytes:
            raise ValueError(f"the destination must have {spec.plan.nbytes} bytes, not {self._memory.nbytes}")
        self._spec = spec
        self._node = spec.node(node)
        self._reads = BlockReads(spec, self._memory, links.connector, hooks)
        self._on_block = hooks.on_block
        self._region = region
        order = spec.order(self._node) or ()
        self._planned = {block: source for source, block in order}
        self._slots = spec.slots(self._node)
        self._kept = tuple(range(spec.blocks) if self._node in spec.plan.sources else sorted(set(held)))
        self._session = Session(
            blocks=spec.blocks,
            peers=[peer for peer in range(len(spec.plan.members)) if peer != self._node],
            order=order,
            held=self._kept,
            epoch=spec.plan.epoch,
            shift=spec.blocks * self._node // len(spec.plan.members),
            near=spec.near(self._node),
            in_slots=bool(self._slots),
            settings=(settings or SessionSettings()).for_links(spec.block_s),
        )
        if self._node not in spec.plan.sources:  # the first pulls wait for no bitfield
            self._session.presume(spec.holders)
        self._replanner = Replanner(spec, self._node)
        self._tally = CastTally()
        self._pulls: dict[int, asyncio.Task[ReceivedBlock]] = {}
        self._failures: dict[str, str] = {}  # by node: why its latest pull failed
        self._watches = Watches(
            spec,
            links.watcher,
            on_bitfield=self._on_bitfield,
            on_verdict=self._on_verdict,
            on_lost=self._on_peer_lost,
        )
        self._ended: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0
        self._reporting: asyncio.TimerHandle | None = None
        self._started_s = 0.0
        self._ended_s: float | None = None

    def __repr__(self) -> str:
        return f"Cast({self._spec.plan.cast_id} at {self._name(self._node)}: {self._session!r})"

    async def run(self) -> CastReport:
        """Fill the memory; to be called once.

        Raises BlocksLost, which names the blocks that no node can serve, and what the hooks raise. Blocks
        that `on_block` reported stay valid. When this ends, also by cancellation, nothing writes into the
        memory any more, and no task, timer or connection of the cast is left but those that `links` keeps.
        """
        loop = asyncio.get_running_loop()
        self._started_s, self._ended = loop.time(), loop.create_future()
        async with self._reads:
            try:
                self._begin()
                await self._ended
            finally:
                self._ended_s = loop.time()
                try:
                    await self._stop()
                finally:
                    self._memory.close()  # now, and not when this is collected: the caller may unmap it
        if self._session.state is SessionState.FAILED:
            raise lost_blocks(self._spec, self._session.unreachable, self._lost)
        return self.report

    @property
    def report(self) -> CastReport:
        """The report up to now."""
        spec, tally = self._spec, self._tally
        by_url = {member.address: member.node for member in spec.plan.members}
        ended_s = self._ended_s
        if ended_s is None:
            ended_s = asyncio.get_running_loop().time() if self._ended is not None else self._started_s
        return CastReport(
            cast=spec.plan.cast_id,
            node=self._name(self._node),
            state=self._session.state.value,
            blocks=spec.blocks,
            held=self._session.bitfield.held.bit_count(),
            nbytes=sum(tally.by_peer.values()),
            seconds=ended_s - self._started_s,
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
        """The names of slow nodes; nodes that joined later than this one's spec are left out."""
        slow, known = self._replanner.verdict.slow, len(self._spec.plan.members)
        return tuple(self._name(node) for node in slow if node < known)

    @property
    def _lost(self) -> dict[str, str]:
        """Why each node was lost, by name: its connection's fault, its latest read's, or the session's."""
        lost_peers = {self._name(peer): reason for peer, reason in self._session.lost_peers.items()}
        failures = {name: reason for name, reason in self._failures.items() if name in lost_peers}
        return lost_peers | failures | self._tally.lost

    # Start and end.

    def _begin(self) -> None:
        if self._region is not None:
            for block in self._kept:
                self._region.mark(*self._spec.extent(block))
        self._publish(self._session.bitfield)
        self._step(self._session.start)
        self._report_later()

    async def _stop(self) -> None:
        """Cancel everything; on return nothing writes into the memory any more."""
        assert self._ended is not None
        if not self._ended.done():
            self._ended.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if self._reporting is not None:
            self._reporting.cancel()
        tasks = [*self._pulls.values(), *self._watches.tasks]
        for task in tasks:
            task.cancel()
        if self._session.state is SessionState.RUNNING:
            self._session.cancel()
        self._publish(replace(self._session.bitfield, pending=0))
        await join_shielded(tasks)

    # Events are fed to the session, which returns actions.

    def _step(self, event: Callable[[float], list[Action]]) -> None:
        """Feed an event to the session and apply its actions; a fault ends the cast."""
        assert self._ended is not None
        if self._ended.done():
            return
        try:
            actions = event(asyncio.get_running_loop().time())
            for action in actions:
                self._apply(action)
            if _PUBLISH in actions:  # once: it publishes the current state
                self._publish(self._session.bitfield)
            self._set_timer()
        except Exception as error:  # of any kind: `run` waits, and raises it
            self._ended.set_exception(error)
            return
        if self._session.state is not SessionState.RUNNING:
            self._ended.set_result(None)

    def _apply(self, action: Action) -> None:
        match action:
            case StartPull():
                task = self._pull(action)
                self._pulls[action.number] = task
                task.add_done_callback(partial(self._on_pull_ended, action))
            case DropPull():
                logger.info("cast %s: dropping a pull: %s", self._spec.plan.cast_id, action.reason)
                self._tally.late += action.late
                self._pulls[action.number].cancel()
            case RequestHave():
                self._watches.request_have(action.peer, action.number)
            case PublishBitfield():
                pass  # once all else is done

    def _publish(self, reported: Bitfield) -> None:
        if self._region is not None:
            self._region.cast(self._spec.plan.block_bytes, reported)

    def _set_timer(self) -> None:
        """Set the timer to the session's deadline; one that is too early is set again when it fires."""
        deadline_s = self._session.deadline_s
        if self._timer is not None and (deadline_s is None or deadline_s < self._timer_s):
            self._timer.cancel()
            self._timer = None
        if self._timer is None and deadline_s is not None:
            self._timer_s = deadline_s
            self._timer = asyncio.get_running_loop().call_at(deadline_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._step(self._session.on_timer)

    # Events of peers.

    def _on_bitfield(self, peer: int, reported: Bitfield, answers: int) -> None:
        self._step(lambda now_s: self._session.on_bitfield(peer, reported, now_s, answers or None))

    def _on_peer_lost(self, peer: int, reason: CastError, epoch: int | None) -> None:
        logger.warning("cast %s: lost %s: %s", self._spec.plan.cast_id, self._name(peer), reason)
        self._tally.lost[self._name(peer)] = str(reason)
        self._replanner.on_peer_lost(peer)
        self._step(lambda now_s: self._session.on_lost(peer, now_s, epoch))

    # Slow nodes.

    def _report_later(self) -> None:
        loop, replanner = asyncio.get_running_loop(), self._replanner
        if replanner.detector is not None and self._session.state is SessionState.RUNNING:
            self._reporting = loop.call_later(replanner.report_interval_s, self._report)

    def _report(self) -> None:
        """Send the log of pulls to the detector."""
        detector, now_s = self._replanner.detector, asyncio.get_running_loop().time()
        if detector is not None:
            self._watches.send_report(detector, lambda: self._replanner.report(now_s))
        self._report_later()

    def _on_verdict(self, verdict: StragglerVerdict) -> None:
        order = self._replanner.on_verdict(verdict)
        if order is None:
            return
        logger.warning("cast %s: replanning around %s", self._spec.plan.cast_id, ", ".join(self._slow))
        self._planned = {block: source for source, block in order}
        self._step(lambda now_s: self._session.replan(verdict.plan, order, now_s))

    # Pulls.

    def _pull(self, pull: StartPull) -> "asyncio.Task[ReceivedBlock]":
        planned = self._session.in_slots and self._planned.get(pull.block) == pull.source
        slot = self._slots.get(pull.block) if planned else None
        on_started = partial(self._on_started, pull)
        return asyncio.create_task(self._reads.read(pull.block, pull.source, on_started, slot))

    def _on_started(self, pull: StartPull) -> None:
        """Record the first byte: the pull waits neither for the source nor for its slot any more."""
        self._replanner.log.on_started(pull.number, pull.source, asyncio.get_running_loop().time())
        self._step(lambda now_s: self._session.on_started(pull.number, now_s))

    def _on_pull_ended(self, pull: StartPull, task: "asyncio.Task[ReceivedBlock]") -> None:
        del self._pulls[pull.number]
        arrived = not task.cancelled() and task.exception() is None
        self._replanner.log.on_ended(pull.number, asyncio.get_running_loop().time(), arrived=arrived)
        error = None if task.cancelled() else task.exception()
        if task.cancelled():
            self._step(lambda now_s: self._session.on_failed(pull.number, now_s))
        elif isinstance(error, CastError):
            peer = self._name(pull.source)
            logger.warning("cast %s: block %d of %s: %s", self._spec.plan.cast_id, pull.block, peer, error)
            self._tally.failed += 1
            self._failures[peer] = str(error) or type(error).__name__
            self._step(lambda now_s: self._session.on_failed(pull.number, now_s))
            is_lost = pull.source in self._session.lost_peers
            if isinstance(error, PeerUnreachable) and self._is_unwatched_holder(pull.source) and not is_lost:
                self._on_peer_lost(pull.source, error, None)
        elif error is not None:
            self._end_with(error)
        elif task.result().units:
            self._on_damaged(pull, task.result())
        else:
            self._step(partial(self._on_arrived, pull, task.result().transport))

    def _is_unwatched_holder(self, peer: int) -> bool:
        """Return whether the peer was taken to hold everything, and no watch is open to report its loss."""
        return peer in self._spec.holders and not self._watches.is_open(peer)

    def _on_damaged(self, pull: StartPull, arrived: ReceivedBlock) -> None:
        peer, units = self._name(pull.source), arrived.units
        logger.warning(
            "cast %s: damaged units %s in block %d from %s", self._spec.plan.cast_id, units, pull.block, peer
        )
        self._tally.damaged += 1
        self._step(lambda now_s: self._session.on_damaged(pull.number, now_s))

    def _on_arrived(self, pull: StartPull, transport: str, now_s: float) -> list[Action]:
        offset, nbytes = self._spec.extent(pull.block)
        # Where all targets are slow there is no plan: any node may serve.
        planned = self._planned.get(pull.block, pull.source) == pull.source
        peer, at_s = self._name(pull.source), now_s - self._started_s
        self._tally.add_block(peer, transport, nbytes, at_s, planned=planned)
        if self._region is not None:
            self._region.mark(offset, nbytes)
        if self._on_block is not None:
            self._on_block(offset, nbytes)
        return self._session.on_arrived(pull.number, now_s)

    def _end_with(self, error: BaseException) -> None:
        assert self._ended is not None
        if not self._ended.done():
            self._ended.set_exception(error)

    def _name(self, node: int) -> str:
        return self._spec.plan.members[node].node
