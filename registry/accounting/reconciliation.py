"""Reconciliation of the ledger: the busy time of instances equals the usage recorded for requests. Pure.

In whole microseconds and for each call on each instance, the time that intervals name is that of the record's
slices, or of the LostCall where that has more; and for each process of a node, the allocated time of its
instances is the time with at least one instance, within 1 ms an interval. Times are compared only where one
process took them, so that clock adjustments do not matter.

`WRONG` needs a proof: an instance that has ended with all of it written; intervals that do not follow each
other, or do not attribute their busy time; or a record that differs from the node's report of a settled call.
`EXACT` needs one too: `OPEN` is time that may still be written, and `UNPROVEN` adds up as far as it can be
checked, where part of the proof cannot be read.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

from registry.accounting.gpu_shares import recorded_us, request_id_of
from registry.accounting.instance_account import WHOLE, CallName, InstanceAccount, NamedCall, TimeSpan
from registry.accounting.instance_account import BalanceVerdict as BalanceVerdict
from registry.accounting.presence import Presence
from registry.accounting.usage_report import by_end, overlaps
from registry.records.usage import InstanceInterval, LostCall, RequestRecord

# Metered time and clock time are both rounded once an interval.
TOLERANCE_US = 1000

# An upper bound of a request's duration plus clock skew: the intervals of this time before and after the
# requested span name the calls of its records.
MARGIN_S = 3600.0

NO_INSTANCES: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceBalance:
    """The balance of one instance. `used_us` is in records, `lost_us` was used by calls without a record."""

    instance_id: str
    node: str
    busy_us: int
    used_us: int
    lost_us: int
    verdict: BalanceVerdict
    why: str = ""

    @property
    def missing_us(self) -> int:
        """Busy time that no call is known to have used; negative where more was used than metered."""
        return self.busy_us - self.used_us - self.lost_us


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeBalance:
    """The balance of one node: `present_us` is the time during which it held an instance."""

    node: str
    present_us: int
    allocated_us: int
    verdict: BalanceVerdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciliation:
    """The balance of every instance and node."""

    instances: tuple[InstanceBalance, ...]
    nodes: tuple[NodeBalance, ...]
    requests: int

    @property
    def verdict(self) -> BalanceVerdict:
        """The worst of all verdicts."""
        found = {one.verdict for one in self.instances} | {one.verdict for one in self.nodes}
        return next(
            (v for v in (BalanceVerdict.WRONG, BalanceVerdict.OPEN, BalanceVerdict.UNPROVEN) if v in found),
            BalanceVerdict.EXACT,
        )

    def __str__(self) -> str:
        """Return a line for each instance and node that does not add up; empty where all do."""
        lines = [
            f"instance {one.instance_id} on {one.node} is {one.verdict}: busy {one.busy_us} us, "
            f"used {one.used_us}, lost {one.lost_us}, missing {one.missing_us}"
            + (f" ({one.why})" if one.why else "")
            for one in self.instances
            if one.verdict is not BalanceVerdict.EXACT
        ]
        lines += [
            f"node {one.node} is {one.verdict}: it held instances for {one.present_us} us, "
            f"of which {one.allocated_us} us are accounted for"
            for one in self.nodes
            if one.verdict is not BalanceVerdict.EXACT
        ]
        return "\n".join(lines)


class Reconciler:
    """Adds up a ledger, or the `requested` span of it.

    Feed it all intervals that overlap `read`, each instance's in their order, and after each `add_intervals`
    compare the calls of `pop_ended_calls`; after the last, those of `pop_open_calls`. Then add the lost calls
    of a somewhat longer span, then each record that ended in the requested span: a record written meanwhile
    is then merely ahead. It keeps instances, calls in flight, and calls that differ from their records:
    `retained` counts them.
    """

    def __init__(self, requested: TimeSpan = WHOLE) -> None:
        self.requested = requested
        self.read = TimeSpan(requested.since - MARGIN_S, requested.until + MARGIN_S)
        self._open_calls = 0
        self._instances: dict[str, InstanceAccount] = {}
        self._presence: dict[tuple[str, int], Presence] = {}
        self._named: list[NamedCall] = []
        self._ended: dict[str, float] = {}  # instances whose calls in flight are not compared yet
        self._short: dict[CallName, NamedCall] = {}
        self._requests = 0

    def add_intervals(self, intervals: Iterable[InstanceInterval]) -> None:
        """Add the allocated time of instances."""
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
                span = (_micros(self.read.since), _micros(self.read.until))
                self._presence[process] = Presence(*span, gpu_count=interval.gpu_count)
            presence = self._presence[process]
            presence.add(micros(interval.from_at), micros(interval.to_at), interval.allocated_us)
        if to_at is not None:
            for name in [name for name, at in self._ended.items() if at < to_at]:
                self._close(name)

    @property
    def retained(self) -> int:
        return len(self._instances) + self._open_calls + len(self._short)

    def pop_ended_calls(self) -> list[NamedCall]:
        """Return the calls that no interval follows, to be compared with their records now."""
        found, self._named = self._named, []
        return found

    def pop_open_calls(self) -> list[NamedCall]:
        """Return the calls that are not over when all intervals have been added."""
        for name in list(self._instances):
            self._close(name)
        return self.pop_ended_calls()

    def compare(self, calls: Iterable[NamedCall], records: Mapping[CallName, RequestRecord]) -> None:
        """Compare calls with their records, by call and instance; some have none."""
        for call in calls:
            record = records.get(call.name)
            call.recorded_us = 0 if record is None else recorded_us(record, *call.name)
            if record is not None and self.requested.holds(record.ended_at):
                self._instances[call.instance_id].named_us += call.recorded_us
            if call.recorded_us != call.metered_us:
                self._short[call.name] = call

    def add_lost(self, lost: Iterable[LostCall], records: Mapping[CallName, RequestRecord]) -> None:
        """Add calls that nodes reported lost, with the records of those that have one after all."""
        for one in lost:
            name = one.call_id, one.instance_id
            record = records.get(name)
            rest_us = max(0, one.used_us - (0 if record is None else recorded_us(record, *name)))
            short = self._short.get(name)
            if short is None and not self.requested.holds(one.ended_at):
                continue
            instance = self._instance(one.instance_id, one.node)
            if short is not None:
                rest_us = max(0, rest_us - short.lost_us)
                short.lost_us += rest_us
            else:
                instance.unnamed_us += rest_us
            instance.lost_us += rest_us

    def add(self, record: RequestRecord) -> None:
        """Add a request."""
        self._requests += 1
        for part in record.gpu:
            instance = self._instance(part.instance_id, part.node)
            instance.used_us += part.gpu_us
            if request_id_of(part.call_id) != record.request_id:
                instance.fault = f"the record {record.request_id} names another request's call"

    def result(self, *, live: Mapping[str, str] = NO_INSTANCES) -> Reconciliation:
        """Return the balance of everything added so far.

        `live` maps instances to their nodes, for instances that may have calls in flight or unwritten time.
        """
        for call in self._short.values():
            self._instances[call.instance_id].add_difference(call)
        balances = [self._balance(name, live) for name in sorted(self._instances)]
        open_nodes = {*live.values(), *(one.node for one in self._instances.values() if one.unwritten)}
        nodes = sorted({node for node, _ in self._presence})
        return Reconciliation(
            instances=tuple(balances),
            nodes=tuple(self._node(node, open_nodes) for node in nodes),
            requests=self._requests,
        )

    def _close(self, name: str) -> None:
        self._ended.pop(name, None)
        left = self._instances[name].close(name)
        self._open_calls -= len(left)
        self._named += left

    def _instance(self, name: str, node: str) -> InstanceAccount:
        found = self._instances.get(name)
        if found is None:
            found = self._instances[name] = InstanceAccount(node, self.read)
        return found

    def _balance(self, name: str, live: Mapping[str, str]) -> InstanceBalance:
        instance = self._instances[name]
        found = instance.result(live=name in live)
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
        verdict = BalanceVerdict.EXACT
        for process, presence in self._presence.items():
            if process[0] != node:
                continue
            tolerance_us = presence.intervals * TOLERANCE_US * presence.gpu_count
            over_us = presence.over_us
            if abs(over_us) > tolerance_us and verdict is not BalanceVerdict.WRONG:
                # The intervals of instances that share a node are cut at different times.
                waits = node in open_nodes and over_us < 0
                verdict = BalanceVerdict.OPEN if waits else BalanceVerdict.WRONG
            present_us, allocated_us = present_us + presence.present_us, allocated_us + presence.allocated_us
        return NodeBalance(node=node, present_us=present_us, allocated_us=allocated_us, verdict=verdict)


def reconcile(
    records: Iterable[RequestRecord],
    intervals: Iterable[InstanceInterval],
    lost: Iterable[LostCall],
    *,
    live: Mapping[str, str] = NO_INSTANCES,
    requested: TimeSpan = WHOLE,
) -> Reconciliation:
    """Return the balance of a whole ledger, or of the requested span of it; see `Reconciler`."""
    records, lost = list(records), list(lost)
    of_call = {(part.call_id, part.instance_id): record for record in records for part in record.gpu}
    reconciler = Reconciler(requested)
    read = [one for one in intervals if overlaps(one, reconciler.read.since, reconciler.read.until)]
    for _, together in groupby(by_end(read), key=lambda one: one.to_at):
        reconciler.add_intervals(together)
        reconciler.compare(reconciler.pop_ended_calls(), of_call)
    reconciler.compare(reconciler.pop_open_calls(), of_call)
    reconciler.add_lost(lost, of_call)
    for record in records:
        if requested.holds(record.ended_at):
            reconciler.add(record)
    return reconciler.result(live=live)


def _micros(at: float) -> int | None:
    return micros(at) if math.isfinite(at) else None


def micros(at: float) -> int:
    """Return Unix seconds as whole microseconds."""
    return round(at * 1e6)
