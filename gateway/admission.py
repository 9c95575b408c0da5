"""Who waits: one lane a function version, fair between tenants and bounded. Pure but for the events."""

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gateway.contract import Call, DispatchError, Stage
from gateway.directory import VersionKey
from gateway.fairness import FairLine, Tally
from gateway.servers import Server
from registry.function import Task
from registry.messages import Compute, Generate


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """How many calls may wait for one function version, and in all; and the `Retry-After` of a refusal.

    Where as many wait, a call of a tenant that has fewer waiting than another takes the place of the
    newest of that other's.
    """

    held_per_function: int = 2000
    held: int = 8000
    retry_after_s: int = 2


class Ticket:
    """One call: waiting in a lane, on an instance, or refused. `wake` is set whenever that changes."""

    __slots__ = (
        "arrival",
        "arrived_s",
        "batches",
        "begun",
        "cost",
        "error",
        "failure_serial",
        "goes_to",
        "hot",
        "instance",
        "key",
        "ready_s",
        "tenant",
        "wake",
    )

    def __init__(self, call: Call, arrived_s: float, failure_serial: int, *, hot: bool) -> None:
        self.key = VersionKey(call.version.function, call.version.version)
        self.tenant = call.tenant
        self.cost = _cost(call)
        self.batches = call.version.task is not Task.HANDLER  # its instance can take one more at any time
        self.arrival = 0  # its number among all calls, once it was let in
        self.arrived_s = arrived_s
        self.failure_serial = failure_serial  # start failures after this one concern this call
        self.hot = hot  # a ready instance existed when it came
        self.ready_s: float | None = arrived_s if hot else None  # when the first ready one was seen
        self.instance: Server | None = None
        self.begun = False  # it had a token from `instance`
        self.goes_to = ""  # the instance that it moves to from a pipeline, wherever that can be
        self.error: DispatchError | None = None
        self.wake = asyncio.Event()

    def lost_instance(self) -> None:
        """The ready instance that the call found is gone; if there is no other, it waits for a start."""
        if self.instance is None:
            self.hot, self.ready_s = False, None

    def __repr__(self) -> str:
        at = self.instance.instance_id if self.instance else "held"
        return f"<Ticket {self.key} of {self.tenant} {self.error or at}>"


class Lane:
    """The calls of one function version: `held` wait, fairly by tenant; the others are on instances."""

    def __init__(self, key: VersionKey) -> None:
        self.key = key
        self.held: FairLine[Ticket] = FairLine()
        self.moving: dict[int, Ticket] = {}  # those of `held` that go to a certain instance, by arrival
        self.tenants = Tally()  # of `held`
        self.unready = False  # some of `held` have not seen a ready instance yet
        self.stage: Stage | None = None  # what `held` were told last

    def __repr__(self) -> str:
        return f"<Lane {self.key} held={len(self.held)} in_flight={self.in_flight}>"

    @property
    def in_flight(self) -> int:
        return self.held.active


class Admission:
    """All lanes under common limits. Every ticket that was admitted must be given to `leave`."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._lanes: dict[VersionKey, Lane] = {}
        self._tenants = Tally()  # of all that are held
        self._arrivals = 0
        self.draining = False

    def __repr__(self) -> str:
        return f"<Admission lanes={len(self._lanes)} held={self.held} draining={self.draining}>"

    @property
    def held(self) -> int:
        return self._tenants.total

    @property
    def calls(self) -> int:
        return self.held + sum(lane.in_flight for lane in self._lanes.values())

    def lanes(self) -> Iterator[Lane]:
        return iter(list(self._lanes.values()))

    def find(self, key: VersionKey) -> Lane | None:
        return self._lanes.get(key)

    def lane(self, key: VersionKey) -> Lane:
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = Lane(key)
        return lane

    def check_open(self) -> None:
        """Raise DispatchError if nothing new is taken at all."""
        if self.draining:
            raise DispatchError(
                "draining",
                "this gateway is shutting down",
                status=503,
                retry_after_s=self._limits.retry_after_s,
            )

    def hold(self, ticket: Ticket) -> Lane:
        """Put a new call into its lane. Raises DispatchError if too many wait, and none should rather go."""
        lane = self.lane(ticket.key)
        limits = self._limits
        if len(lane.held) >= limits.held_per_function:
            self._make_room(ticket, lane.tenants, (lane,))
            lane = self.lane(ticket.key)
        elif self._tenants.total >= limits.held:
            self._make_room(ticket, self._tenants, self.lanes())
            lane = self.lane(ticket.key)
        lane.unready = lane.unready or ticket.ready_s is None
        self._arrivals += 1
        ticket.arrival = self._arrivals
        lane.held.add(ticket)
        self._count(lane, ticket)
        return lane

    def hold_again(self, ticket: Ticket) -> None:
        """Take a call off its instance and put it back into its lane, in its place by arrival. It is
        never refused for want of room."""
        lane = self.lane(ticket.key)
        lane.unready = lane.unready or ticket.ready_s is None
        lane.held.put_back(ticket)
        if ticket.goes_to:
            lane.moving[ticket.arrival] = ticket
        self._count(lane, ticket)
        ticket.instance = None
        ticket.wake.clear()

    def assign(self, ticket: Ticket, instance: Server) -> None:
        """Take a waiting call out of its lane and onto an instance."""
        lane = self._lanes[ticket.key]
        lane.held.take(ticket)
        self._discount(lane, ticket)
        ticket.goes_to = ""
        ticket.instance, ticket.begun = instance, False
        ticket.wake.set()

    def refuse(self, ticket: Ticket, error: DispatchError) -> None:
        """Take a waiting call out of its lane for good."""
        self._unhold(ticket)
        ticket.error = error
        ticket.wake.set()

    def leave(self, ticket: Ticket) -> None:
        """The call is over, wherever it was. Idempotent."""
        if ticket.instance is None:
            self._unhold(ticket)
            return
        lane = self._lanes[ticket.key]
        lane.held.finish(ticket.tenant)
        ticket.instance = None
        ticket.wake.clear()
        self._tidy(ticket.key)

    def _make_room(self, ticket: Ticket, tenants: Tally, lanes: Iterable[Lane]) -> None:
        """Let the newest call of whoever has most waiting go, unless that is hardly more than the tenant of
        `ticket` has. Raises DispatchError."""
        richest = tenants.richest
        if richest is not None and tenants[ticket.tenant] + 1 < tenants.most:
            fullest = max(lanes, key=lambda lane: lane.tenants[richest])
            newest = fullest.held.newest(richest)
            if newest is not None:
                self.refuse(newest, self._overloaded(newest.key))
                return
        error = self._overloaded(ticket.key)
        self._tidy(ticket.key)
        raise error

    def _overloaded(self, key: VersionKey) -> DispatchError:
        lane = self._lanes.get(key)
        return DispatchError(
            "overloaded",
            f"{len(lane.held) if lane else 0} calls wait for {key.function} already, {self.held} in all",
            status=503,
            retry_after_s=self._limits.retry_after_s,
        )

    def _unhold(self, ticket: Ticket) -> None:
        lane = self._lanes.get(ticket.key)
        if lane is not None and lane.held.remove(ticket):
            self._discount(lane, ticket)
            self._tidy(ticket.key)

    def _count(self, lane: Lane, ticket: Ticket) -> None:
        lane.tenants.add(ticket.tenant)
        self._tenants.add(ticket.tenant)

    def _discount(self, lane: Lane, ticket: Ticket) -> None:
        lane.moving.pop(ticket.arrival, None)
        lane.tenants.drop(ticket.tenant)
        self._tenants.drop(ticket.tenant)

    def _tidy(self, key: VersionKey) -> None:
        lane = self._lanes.get(key)
        if lane is not None and not lane.held and not lane.in_flight:
            del self._lanes[key]


def _cost(call: Call) -> int:
    """Roughly what a call will take, in tokens."""
    match call.work:
        case Generate(prompt_ids=prompt, sampling=sampling):
            return len(prompt) + sampling.max_tokens
        case Compute(token_ids=texts):
            return 1 + sum(map(len, texts))
        case _:
            return 1
