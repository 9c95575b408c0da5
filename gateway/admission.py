"""Who waits: one first-come-first-served lane a function version, bounded. Pure but for the events."""

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from gateway.contract import DispatchError, Stage
from gateway.directory import VersionKey
from registry.instance import InstanceRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """How many calls may wait for one function version, and in all; and the `Retry-After` of a refusal."""

    held_per_function: int = 2000
    held: int = 8000
    retry_after_s: int = 2


class Ticket:
    """One call: waiting in a lane, on an instance, or refused. `wake` is set whenever that changes."""

    __slots__ = (
        "arrived_s",
        "error",
        "failure_serial",
        "hot",
        "instance",
        "key",
        "ready_s",
        "wake",
    )

    def __init__(self, key: VersionKey, arrived_s: float, failure_serial: int, *, hot: bool) -> None:
        self.key = key
        self.arrived_s = arrived_s
        self.failure_serial = failure_serial  # start failures after this one concern this call
        self.hot = hot  # a ready instance existed when it came
        self.ready_s: float | None = arrived_s if hot else None  # when the first ready one was seen
        self.instance: InstanceRecord | None = None
        self.error: DispatchError | None = None
        self.wake = asyncio.Event()

    def lost_instance(self) -> None:
        """The ready instance that the call found is gone; if there is no other, it waits for a start."""
        if self.instance is None:
            self.hot, self.ready_s = False, None

    def __repr__(self) -> str:
        at = self.instance.instance_id if self.instance else "held"
        return f"<Ticket {self.key} {self.error or at}>"


class Lane:
    """The calls of one function version: `held` wait in order of arrival, `in_flight` are on instances."""

    def __init__(self, key: VersionKey) -> None:
        self.key = key
        self.held: deque[Ticket] = deque()
        self.in_flight = 0
        self.unready = False  # some of `held` have not seen a ready instance yet
        self.stage: Stage | None = None  # what `held` were told last

    def __repr__(self) -> str:
        return f"<Lane {self.key} held={len(self.held)} in_flight={self.in_flight}>"


class Admission:
    """All lanes under common limits. Every ticket that was admitted must be given to `leave`."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._lanes: dict[VersionKey, Lane] = {}
        self._held = 0
        self.draining = False

    def __repr__(self) -> str:
        return f"<Admission lanes={len(self._lanes)} held={self._held} draining={self.draining}>"

    @property
    def held(self) -> int:
        return self._held

    @property
    def calls(self) -> int:
        return self._held + sum(lane.in_flight for lane in self._lanes.values())

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

    def hold(self, ticket: Ticket, *, again: bool = False) -> None:
        """Put a call into its lane: at the end, or `again` in its place by arrival. Raises DispatchError.

        A call that was admitted before is never refused for want of room.
        """
        lane = self.lane(ticket.key)
        lane.unready = lane.unready or ticket.ready_s is None
        if again:
            place = sum(1 for other in lane.held if other.arrived_s <= ticket.arrived_s)
            lane.held.insert(place, ticket)
            self._held += 1
            return
        if len(lane.held) >= self._limits.held_per_function or self._held >= self._limits.held:
            self._tidy(ticket.key)
            raise DispatchError(
                "overloaded",
                f"{len(lane.held)} calls wait for {ticket.key.function} already",
                status=503,
                retry_after_s=self._limits.retry_after_s,
            )
        lane.held.append(ticket)
        self._held += 1

    def assign(self, ticket: Ticket, instance: InstanceRecord) -> None:
        """Take a waiting (or new) call out of its lane and onto an instance."""
        lane = self.lane(ticket.key)
        self._unhold(lane, ticket)
        lane.in_flight += 1
        ticket.instance = instance
        ticket.wake.set()

    def refuse(self, ticket: Ticket, error: DispatchError) -> None:
        """Take a waiting call out of its lane for good."""
        self._unhold(self.lane(ticket.key), ticket)
        ticket.error = error
        ticket.wake.set()
        self._tidy(ticket.key)

    def unassign(self, ticket: Ticket) -> None:
        """The call is no longer on its instance."""
        assert ticket.instance is not None
        self.lane(ticket.key).in_flight -= 1
        ticket.instance = None
        ticket.wake.clear()
        self._tidy(ticket.key)

    def leave(self, ticket: Ticket) -> None:
        """The call is over, wherever it was. Idempotent."""
        if ticket.instance is not None:
            self.unassign(ticket)
        elif (lane := self._lanes.get(ticket.key)) is not None:
            self._unhold(lane, ticket)
            self._tidy(ticket.key)

    def _unhold(self, lane: Lane, ticket: Ticket) -> None:
        if lane.held and lane.held[0] is ticket:
            lane.held.popleft()
        elif ticket in lane.held:
            lane.held.remove(ticket)
        else:
            return
        self._held -= 1

    def _tidy(self, key: VersionKey) -> None:
        lane = self._lanes.get(key)
        if lane is not None and not lane.held and not lane.in_flight:
            del self._lanes[key]
