"""Whether the ledger adds up: what instances were busy for is what requests were told they used. Pure.

In whole microseconds and for each call on each instance, what intervals name is what its records' slices
say, or its LostCall where that says more; and for each process of a node, what its instances were allocated
is the time in which there was one, within 1 ms an interval. Times are compared only where one process took
them, so that no clock that is set matters.

`WRONG` needs a proof: that an instance has ended and all of it is written; or intervals that do not follow
each other, or do not say whose their busy time is; or a record that differs from what the node says of a
call that it knows to be settled. `EXACT` needs one too: `OPEN` is what may still be written, and `UNPROVEN`
what adds up as far as it can be told, where something that would prove it is not there to be read.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

from registry.gpu_shares import recorded_us
from registry.instance_books import WHOLE, CallName, InstanceBooks, Named, Span
from registry.instance_books import Verdict as Verdict
from registry.presence import Presence
from registry.usage import InstanceInterval, LostCall, RequestRecord
from registry.usage_report import by_end, overlaps

# Metered time and the clock's are both rounded, an interval.
TOLERANCE_US = 1000

# No request is known to last longer, and no clock to be so far off: intervals of this time before and after
# that which is asked for name the calls of its records.
MARGIN_S = 3600.0

NOBODY: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceBalance:
    """One instance. `used_us` is what records name, `lost_us` what no record does though a call used it."""

    instance_id: str
    node: str
    busy_us: int
    used_us: int
    lost_us: int
    verdict: Verdict
    why: str = ""

    @property
    def missing_us(self) -> int:
        """Busy time that nobody is known to have used; negative where more was used than metered."""
        return self.busy_us - self.used_us - self.lost_us


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeBalance:
    """One node: `present_us` is the time in which it held an instance."""

    node: str
    present_us: int
    allocated_us: int
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Conservation:
    """The balance of every instance and node."""

    instances: tuple[InstanceBalance, ...]
    nodes: tuple[NodeBalance, ...]
    requests: int

    @property
    def verdict(self) -> Verdict:
        """The worst of all."""
        found = {one.verdict for one in self.instances} | {one.verdict for one in self.nodes}
        return next((v for v in (Verdict.WRONG, Verdict.OPEN, Verdict.UNPROVEN) if v in found), Verdict.EXACT)

    def __str__(self) -> str:
        """What does not add up, by name; empty where everything does."""
        lines = [
            f"instance {one.instance_id} on {one.node} is {one.verdict}: busy {one.busy_us} us, "
            f"used {one.used_us}, lost {one.lost_us}, missing {one.missing_us}"
            + (f" ({one.why})" if one.why else "")
            for one in self.instances
            if one.verdict is not Verdict.EXACT
        ]
        lines += [
            f"node {one.node} is {one.verdict}: it held instances for {one.present_us} us, "
            f"of which {one.allocated_us} are accounted for"
            for one in self.nodes
            if one.verdict is not Verdict.EXACT
        ]
        return "\n".join(lines)


class Balances:
    """Adds up a ledger, or what of it is of the `asked` times.

    Feed it all intervals that overlap `read`, each instance's in their order, and after each `add` compare
    the calls that it `named`; after the last, those that it `left`. Then the lost calls of somewhat more
    time, then each record that ended in the asked times: whatever is written meanwhile is then merely ahead.
    It keeps instances, calls in flight, and calls that differ from their records: `held` counts them.
    """

    def __init__(self, asked: Span = WHOLE) -> None:
        self.asked = asked
        self.read = Span(asked.since - MARGIN_S, asked.until + MARGIN_S)
        self._open_calls = 0
        self._instances: dict[str, InstanceBooks] = {}
        self._presence: dict[tuple[str, int], Presence] = {}
        self._named: list[Named] = []
        self._ended: dict[str, float] = {}  # instances whose calls in flight are not compared yet
        self._short: dict[CallName, Named] = {}
        self._requests = 0

    def add_intervals(self, intervals: Iterable[InstanceInterval]) -> None:
        """Count what instances were allocated."""
        to_at = None
        for interval in intervals:
            to_at = interval.to_at
            instance = self._instance(interval.instance_id, interval.node)
            before = instance.open_calls
            self._named += instance.add(interval)
            self._open_calls += instance.open_calls - before
            if interval.final:
                self._ended[interval.instance_id] = to_at
            process = interval.node, interval.epoch
            if process not in self._presence:
                self._presence[process] = Presence(_micros(self.read.since), _micros(self.read.until))
            presence = self._presence[process]
            presence.add(micros(interval.from_at), micros(interval.to_at), interval.allocated_us)
        if to_at is not None:
            for name in [name for name, at in self._ended.items() if at < to_at]:
                self._leave(name)

    @property
    def held(self) -> int:
        return len(self._instances) + self._open_calls + len(self._short)

    def named(self) -> list[Named]:
        """Calls that nothing follows of, to be compared with their records now."""
        found, self._named = self._named, []
        return found

    def left(self) -> list[Named]:
        """Calls of which it is not said that they are over, when all intervals are in."""
        for name in list(self._instances):
            self._leave(name)
        return self.named()

    def compare(self, calls: Iterable[Named], records: Mapping[CallName, RequestRecord]) -> None:
        """Hold calls beside their records, by call and instance; some have none."""
        for call in calls:
            record = records.get(call.name)
            call.recorded_us = 0 if record is None else recorded_us(record, *call.name)
            if record is not None and self.asked.holds(record.ended_at):
                self._instances[call.instance_id].named_us += call.recorded_us
            if call.recorded_us != call.metered_us:
                self._short[call.name] = call

    def add_lost(self, lost: Iterable[LostCall], records: Mapping[CallName, RequestRecord]) -> None:
        """Count calls that nodes thought lost; with the records of those that have one after all."""
        for one in lost:
            name = one.call_id, one.instance_id
            record = records.get(name)
            rest_us = max(0, one.used_us - (0 if record is None else recorded_us(record, *name)))
            short = self._short.get(name)
            if short is None and not self.asked.holds(one.ended_at):
                continue
            instance = self._instance(one.instance_id, one.node)
            if short is not None:
                rest_us = max(0, rest_us - short.lost_us)
                short.lost_us += rest_us
            else:
                instance.unnamed_us += rest_us
            instance.lost_us += rest_us

    def add(self, record: RequestRecord) -> None:
        """Count a request."""
        self._requests += 1
        for part in record.gpu:
            instance = self._instance(part.instance_id, part.node)
            instance.used_us += part.gpu_us
            if part.call_id.partition("/")[0] != record.request_id.partition("~")[0]:
                instance.fault = f"the record {record.request_id} names a call of another request"

    def result(self, *, live: Mapping[str, str] = NOBODY) -> Conservation:
        """The balance of everything so far.

        `live` are instances, with their nodes, that may have calls in flight, or time not written down yet.
        """
        for call in self._short.values():
            self._instances[call.instance_id].differs(call)
        balances = [self._balance(name, live) for name in sorted(self._instances)]
        open_nodes = {*live.values(), *(one.node for one in self._instances.values() if one.unwritten)}
        nodes = sorted({node for node, _ in self._presence})
        return Conservation(
            instances=tuple(balances),
            nodes=tuple(self._node(node, open_nodes) for node in nodes),
            requests=self._requests,
        )

    def _leave(self, name: str) -> None:
        self._ended.pop(name, None)
        left = self._instances[name].leave(name)
        self._open_calls -= len(left)
        self._named += left

    def _instance(self, name: str, node: str) -> InstanceBooks:
        found = self._instances.get(name)
        if found is None:
            found = self._instances[name] = InstanceBooks(node, self.read)
        return found

    def _balance(self, name: str, live: Mapping[str, str]) -> InstanceBalance:
        instance = self._instances[name]
        found = instance.judged(live=name in live)
        return InstanceBalance(
            instance_id=name,
            node=instance.node,
            busy_us=instance.busy_us,
            used_us=instance.used_us,
            lost_us=instance.lost_us,
            verdict=found.verdict,
            why=found.why,
        )

    def _node(self, node: str, open_nodes: set[str]) -> NodeBalance:
        present_us = allocated_us = 0
        verdict = Verdict.EXACT
        for process, presence in self._presence.items():
            if process[0] != node:
                continue
            over_us, tolerance_us = presence.over_us, presence.intervals * TOLERANCE_US
            if abs(over_us) > tolerance_us and verdict is not Verdict.WRONG:
                # Of instances that share a node, the intervals are cut at different times.
                waits = node in open_nodes and (over_us < 0 or not process[1])
                verdict = Verdict.OPEN if waits else Verdict.WRONG
            present_us, allocated_us = present_us + presence.present_us, allocated_us + presence.allocated_us
        return NodeBalance(node=node, present_us=present_us, allocated_us=allocated_us, verdict=verdict)


def conservation(
    records: Iterable[RequestRecord],
    intervals: Iterable[InstanceInterval],
    lost: Iterable[LostCall],
    *,
    live: Mapping[str, str] = NOBODY,
    asked: Span = WHOLE,
) -> Conservation:
    """The balance of a whole ledger, or of the asked times of it; see `Balances`."""
    records, lost = list(records), list(lost)
    of_call = {(part.call_id, part.instance_id): record for record in records for part in record.gpu}
    balances = Balances(asked)
    read = [one for one in intervals if overlaps(one, balances.read.since, balances.read.until)]
    for _, together in groupby(by_end(read), key=lambda one: one.to_at):
        balances.add_intervals(together)
        balances.compare(balances.named(), of_call)
    balances.compare(balances.left(), of_call)
    balances.add_lost(lost, of_call)
    for record in records:
        if asked.holds(record.ended_at):
            balances.add(record)
    return balances.result(live=live)


def _micros(at: float) -> int | None:
    return micros(at) if math.isfinite(at) else None


def micros(at: float) -> int:
    """Unix seconds as whole microseconds."""
    return round(at * 1e6)
