"""Carries calls to instances: admits, holds, assigns; the contract's Dispatcher."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.admission import Admission, Lane, Ticket
from gateway.contract import Call, DispatchError, OpenCall, Stage
from gateway.demand import DemandPublisher
from gateway.directory import Directory, VersionKey
from gateway.live_calls import LiveCalls
from gateway.node_client import Links, NodeClient
from gateway.placement import impossible
from gateway.progress import StartProgress
from gateway.router import Slots, slots_of
from gateway.servers import PipelineServer, Server, slots_key
from gateway.serving import Outcome, Serving
from gateway.wakeup import Wakeup
from registry.change import InstanceChanged
from registry.clock import Clock
from registry.instance import InstanceRecord, InstanceState

# How long calls wait for a start while the shared state is away, and no start can be made.
_CUT_OFF_S = 3.0
# How soon the controller hears of calls that come and go without waiting.
_LOAD_DELAY_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchSettings:
    """`max_tries` bounds how often one call is sent anew, `max_starts` how many starts in a row may
    fail before the calls that wait for them do. A full instance is asked
    again after `refused_s`, one that said it drains after `draining_s`."""

    max_tries: int = 8
    max_starts: int = 3
    refused_s: float = 0.02
    draining_s: float = 0.25


@dataclass(slots=True)
class DispatchCounts:
    """Totals since this gateway started."""

    failovers: int = 0  # calls that went on elsewhere after their node was lost
    rerouted: int = 0  # calls that an instance refused before it began
    moved: int = 0  # calls that went on elsewhere from a pipeline, as they were asked to


class CallDispatcher:
    """All calls of this gateway. `pump` runs after every change of the directory and after each call."""

    def __init__(
        self,
        directory: Directory,
        changes: Wakeup,
        links: Links,
        progress: StartProgress,
        admission: Admission,
        demand: DemandPublisher,
        load: Wakeup,
        clock: Clock,
        *,
        rng: random.Random | None = None,
        settings: DispatchSettings | None = None,
    ) -> None:
        self.slots = Slots()
        self.counts = DispatchCounts()
        self.live_calls = LiveCalls()
        self._directory = directory
        self._changes = changes
        self.links = links
        self._progress = progress
        self._admission = admission
        self._demand = demand
        self._load = load
        self.clock = clock
        self._rng = rng or random.Random()
        self._settings = settings or DispatchSettings()
        self._timers: dict[VersionKey, asyncio.TimerHandle] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        changes.subscribe(self.pump)

    def __repr__(self) -> str:
        return f"<CallDispatcher {self._admission!r} {self.slots!r}>"

    def run(self, call: Call) -> "_Run":
        return _Run(self, call)

    async def drain(self) -> None:
        """Take nothing new; return once every call is over."""
        self._admission.draining = True
        await self._idle.wait()

    # --- for Serving

    def client(self, node: str) -> NodeClient | None:
        return self.links.client(node)

    def gpu_of(self, node: str) -> tuple[str, int]:
        entry = self._directory.node(node)
        return ("", 0) if entry is None else (entry.record.gpu_type, entry.record.gpu_count)

    def stage(self, key: VersionKey) -> Stage:
        return self._progress.stage(self._directory, key)

    @property
    def max_tries(self) -> int:
        return self._settings.max_tries

    def again(self, ticket: Ticket, outcome: Outcome, *, failover: bool) -> None:
        """Put a call back into its lane, in its place, and learn from what its instance said."""
        instance = ticket.instance
        assert instance is not None
        self.slots.free(slots_key(instance), ticket.cost, begun=ticket.begun)
        match outcome:
            case Outcome.MOVED | Outcome.STAGE_LOST | Outcome.GONE if isinstance(instance, PipelineServer):
                if not ticket.goes_to:  # nobody here asked for it: the pipeline is over
                    self._directory.live.close(instance.instance_id)
            case Outcome.LOST:
                self.links.lost(instance.node)
            case Outcome.DRAINING:  # its record will say so any moment
                until = self.clock.monotonic_s() + self._settings.draining_s
                self.slots.refuse_until(instance.instance_id, until)
            case Outcome.GONE if isinstance(instance, InstanceRecord):
                self._directory.apply(InstanceChanged(record=_stopped(instance)), self.clock.monotonic_s())
            case Outcome.FULL:
                until = self.clock.monotonic_s() + self._settings.refused_s
                self.slots.refuse_until(instance.instance_id, until)
        if failover:
            self.counts.failovers += 1
        elif outcome is Outcome.MOVED:
            self.counts.moved += 1
        else:
            self.counts.rerouted += 1
        self._admission.hold_again(ticket)
        self._demand.changed(urgent=True)
        self._changes.notify()  # the directory changed

    def begun(self, ticket: Ticket) -> None:
        """The call had its first token where it is, which may take another one now."""
        if ticket.instance is not None and not ticket.begun:
            ticket.begun = True
            self.slots.begun(slots_key(ticket.instance))
            self._assign_held(self._admission.lane(ticket.key))

    # --- calls come and go

    def enter(self, call: Call) -> Ticket:
        self._admission.check_open()
        key = VersionKey(call.version.function, call.version.version)
        ready = self._directory.ready(key)
        ticket = Ticket(call, self.clock.monotonic_s(), self._directory.failure_serial, hot=bool(ready))
        lane = self._admission.find(key)
        first = lane is None or not lane.held
        lane = self._admission.hold(ticket)
        self._idle.clear()
        self._assign_ready(lane, self._directory.servers(key))
        starts_to_wait = ticket.instance is None and first
        self._demand.changed(urgent=starts_to_wait)
        if starts_to_wait:
            lane.stage = self.stage(key)
            self._refuse_hopeless(lane)
            self._load.notify()  # the controller, if it is here, starts what is missing
        else:
            self._load.notify_within(_LOAD_DELAY_S)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        if ticket.instance is not None:
            self.slots.free(slots_key(ticket.instance), ticket.cost, begun=ticket.begun)
        self._admission.leave(ticket)
        self._demand.changed()
        lane = self._admission.find(ticket.key)
        if lane is not None:
            self._assign_held(lane)
        elif self._admission.calls == 0:
            self._idle.set()
        self._load.notify_within(_LOAD_DELAY_S)

    # --- assignment

    def pump(self) -> None:
        """Give waiting calls to whatever instances have room by now."""
        for lane in self._admission.lanes():
            self._assign_held(lane)
            if lane.held and not self._directory.ready(lane.key):
                self._tell_held(lane)

    def _assign_held(self, lane: Lane) -> None:
        if lane.held:
            self._assign_ready(lane, self._directory.servers(lane.key))

    def _assign_ready(self, lane: Lane, ready: Sequence[Server]) -> None:
        now = self.clock.monotonic_s()
        if ready and lane.unready:
            lane.unready = False
            for ticket in lane.held:
                ticket.ready_s = now if ticket.ready_s is None else ticket.ready_s
        for ticket in list(lane.moving.values()):
            self._move(ticket, ready)
        slots = sum(map(slots_of, ready))
        while (following := lane.held.first()) is not None:
            # If this one is not owed a slot nobody is: its tenant has the fewest.
            owed = following.batches and lane.held.is_owed(following.tenant, slots)
            choice = self.slots.choose(ready, self._rng, now, owed=owed, cost=following.cost)
            if choice.instance is None:
                if choice.next_at is not None:
                    self._assign_at(lane.key, choice.next_at - now)
                return
            self._assign(following, choice.instance)

    def _move(self, ticket: Ticket, ready: Sequence[Server]) -> None:
        """Give the instance that a call moves to from a pipeline that call, if it has room: whoever's turn
        it is, this one has waited for its slot already, and what it leaves behind is not kept for long."""
        for server in ready:
            if server.instance_id == ticket.goes_to and self.slots.room(server, owed=True) > 0:
                self._assign(ticket, server)
                return

    def _assign(self, ticket: Ticket, server: Server) -> None:
        self.slots.take(slots_key(server), ticket.cost)
        self._admission.assign(ticket, server)

    def _assign_at(self, key: VersionKey, delay_s: float) -> None:
        if key not in self._timers:
            self._timers[key] = asyncio.get_running_loop().call_later(delay_s, self._timer_rang, key)

    def _timer_rang(self, key: VersionKey) -> None:
        del self._timers[key]
        lane = self._admission.find(key)
        if lane is not None:
            self._assign_held(lane)

    def _tell_held(self, lane: Lane) -> None:
        """Nothing is ready: fail the calls that hope in vain, and let the others see how the start goes."""
        self._refuse_hopeless(lane)
        stage = self.stage(lane.key)
        if stage != lane.stage:
            lane.stage = stage
            for ticket in lane.held:
                ticket.wake.set()

    def _refuse_hopeless(self, lane: Lane) -> None:
        """Fail the calls whose function is gone, can run nowhere, or failed to start too often."""
        key, directory = lane.key, self._directory
        version = directory.version(key)
        deleted = bool(directory.cursor) and key.function not in directory.functions
        nodes = [entry.record for entry in directory.nodes()]
        why = "" if version is None else impossible(version, nodes)
        coming = bool(directory.coming(key))
        if directory.cut_off_s is not None and self.clock.monotonic_s() - directory.cut_off_s > _CUT_OFF_S:
            for ticket in list(lane.held):
                self._admission.refuse(ticket, _no_state())
            return
        if not (deleted or why or (directory.failures(key) and not coming)):
            return  # as nearly always, and then there may be thousands of them
        usable = {node.id for node in directory.usable_nodes()}
        for ticket in list(lane.held):
            if deleted:
                error = DispatchError(
                    "model_not_found", f"the function {key.function} was deleted", status=404
                )
                self._admission.refuse(ticket, error)
                continue
            failures = directory.failures(key, ticket.failure_serial)
            tried = {failure.node for failure in failures}
            spent = len(failures) >= self._settings.max_starts or bool(
                failures and usable and usable <= tried
            )
            if why or (spent and not coming):
                reason = why or failures[-1].error
                self._admission.refuse(
                    ticket,
                    DispatchError(
                        "start_failed",
                        f"{key.function} could not be started: {reason}",
                        status=503,
                        retry_after_s=5,
                    ),
                )


def _no_state() -> DispatchError:
    return DispatchError(
        "state_unavailable", "the registry does not answer, so nothing can start", status=503, retry_after_s=1
    )


class _Run:
    """One call, from its entry to its leave."""

    def __init__(self, dispatcher: CallDispatcher, call: Call) -> None:
        self._dispatcher = dispatcher
        self._call = call

    async def __aenter__(self) -> OpenCall:
        dispatcher = self._dispatcher
        self._ticket = dispatcher.enter(self._call)
        self._serving = Serving(dispatcher, self._call, self._ticket, dispatcher.clock)
        return self._serving

    async def __aexit__(self, *_: object) -> None:
        try:
            await self._serving.aclose()
        finally:
            self._dispatcher.leave(self._ticket)
            if self._serving.unheard:
                await self._serving.learn_used()


def _stopped(instance: InstanceRecord) -> InstanceRecord:
    return InstanceRecord(
        instance_id=instance.instance_id,
        function=instance.function,
        version=instance.version,
        node=instance.node,
        state=InstanceState.STOPPED,
        start_kind=instance.start_kind,
        since=instance.since,
    )
