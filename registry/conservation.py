"""Whether the ledger adds up: what instances were busy for is what requests were told they used. Pure.

For each instance, in whole microseconds, busy = what the records' slices name + what was lost; for each
process of a node, what its instances were allocated is the time in which there was one, within 1 ms an
interval. Times are compared only where one process took them, so that no clock that is set matters.

Where that does not hold, something may merely not be written yet. `WRONG` needs a proof: that an instance
has ended and all of it is written; or intervals that do not follow each other, or do not say whose their
busy time is; or a record that differs from what the node says of a call that it knows to be settled.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from registry.gpu_shares import recorded_us
from registry.usage import CallPart, InstanceInterval, LostCall, RequestRecord

# Metered time and the clock's are both rounded, an interval.
TOLERANCE_US = 1000

NOBODY: Mapping[str, str] = {}


class Verdict(StrEnum):
    EXACT = "exact"
    OPEN = "open"  # not to be told yet: calls are in flight, or time of theirs is not written
    WRONG = "wrong"


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
        return next((v for v in (Verdict.WRONG, Verdict.OPEN) if v in found), Verdict.EXACT)

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


class LostCalls:
    """What calls used beyond what their records say. Feed it each record before asking."""

    def __init__(self, lost: Iterable[LostCall]) -> None:
        self._calls: dict[tuple[str, str], list[LostCall]] = defaultdict(list)
        for call in lost:
            self._calls[call.call_id, call.instance_id].append(call)
        self._recorded_us: dict[tuple[str, str], int] = defaultdict(int)

    def add(self, record: RequestRecord) -> None:
        """Note what a record says of calls that a node thought lost."""
        for part in record.gpu:
            if (part.call_id, part.instance_id) in self._calls:
                self._recorded_us[part.call_id, part.instance_id] += part.gpu_us

    def used_us(self, call_id: str, instance_id: str) -> int:
        """What the node says that the call used in all; 0 if it did not think it lost."""
        return max((call.used_us for call in self._calls.get((call_id, instance_id), ())), default=0)

    def unrecorded(self) -> list[tuple[LostCall, int]]:
        """Each call with the microseconds that no record has."""
        found = []
        for name, calls in self._calls.items():
            recorded_us = self._recorded_us.get(name, 0)
            for call in calls:
                found.append((call, max(0, call.used_us - recorded_us)))
                recorded_us = max(0, recorded_us - call.used_us)
        return found


@dataclass(slots=True)
class _Instance:
    """What is known of an instance. `itemised`: its intervals say which calls used what."""

    node: str
    busy_us: int = 0
    used_us: int = 0
    intervals: int = 0
    itemised: bool = False
    ended: bool = False
    over_us: int = 0  # of calls that the node knows to be settled
    fault: str = ""
    # Beginnings of intervals less ends, by the moment: where one follows another they cancel out.
    edges: Counter[float] = field(default_factory=Counter)
    # Calls that their node knows to be settled, where the record alone does not say the same.
    settled_us: dict[str, tuple[int, int]] = field(default_factory=dict)

    def add(self, interval: InstanceInterval) -> None:
        self.intervals += 1
        self.busy_us += interval.busy_us
        if not interval.epoch:
            return
        self.itemised = True
        self.ended = self.ended or interval.final
        self.over_us += sum(part.to_us for part in interval.calls if part.over)
        if sum(part.used_us for part in interval.calls) != interval.busy_us:
            self.fault = "an interval's calls are not what it was busy for"
        for at, sign in ((interval.from_at, 1), (interval.to_at, -1)):
            self.edges[at] += sign
            if not self.edges[at]:
                del self.edges[at]

    @property
    def unwritten(self) -> bool:
        """Whether its node, or the journal that it left, may hold time that is not written."""
        return not self.ended and (self.itemised or not self.intervals)

    @property
    def chained(self) -> bool:
        """Whether the intervals follow each other from the first to the last."""
        return sorted(self.edges.values()) in ([], [-1, 1])


class Balances:
    """Adds up a ledger: feed it all intervals (and what records say of settled calls), then all lost calls,
    then each record. Read them in this order: whatever is written meanwhile is then merely ahead."""

    def __init__(self) -> None:
        self._lost = LostCalls(())
        self._instances: dict[str, _Instance] = {}
        self._presence: dict[tuple[str, int], list[tuple[int, int, int]]] = defaultdict(list)
        self._requests = 0

    def add_intervals(self, intervals: Iterable[InstanceInterval]) -> None:
        """Count what instances were allocated."""
        for interval in intervals:
            self._instance(interval.instance_id, interval.node).add(interval)
            process = interval.node, interval.epoch
            times = micros(interval.from_at), micros(interval.to_at), interval.allocated_us
            self._presence[process].append(times)

    def add_settled(self, instance_id: str, part: CallPart, record: RequestRecord | None) -> None:
        """Compare a call that is over, of an instance whose intervals are known, with its record."""
        recorded = 0 if record is None else recorded_us(record, part.call_id, instance_id)
        if recorded != part.to_us:
            self._instances[instance_id].settled_us[part.call_id] = part.to_us, recorded

    def add_lost(self, lost: Iterable[LostCall]) -> None:
        """Note all calls that nodes thought lost."""
        self._lost = LostCalls(lost)

    def add(self, record: RequestRecord) -> None:
        """Count a request."""
        self._requests += 1
        self._lost.add(record)
        for part in record.gpu:
            instance = self._instance(part.instance_id, part.node)
            instance.used_us += part.gpu_us
            if part.call_id.partition("/")[0] != record.request_id.partition("~")[0]:
                instance.fault = f"the record {record.request_id} names a call of another request"

    def result(self, *, live: Mapping[str, str] = NOBODY) -> Conservation:
        """The balance of everything so far.

        `live` are instances, with their nodes, that may have calls in flight, or time not written down yet.
        """
        lost_us: dict[str, int] = defaultdict(int)
        for call, unrecorded_us in self._lost.unrecorded():
            lost_us[call.instance_id] += unrecorded_us
            self._instance(call.instance_id, call.node)
        balances = {name: self._balance(name, lost_us[name], live) for name in sorted(self._instances)}
        open_nodes = {*live.values(), *(one.node for one in self._instances.values() if one.unwritten)}
        nodes = sorted({node for node, _ in self._presence})
        return Conservation(
            instances=tuple(balances.values()),
            nodes=tuple(self._node(node, open_nodes) for node in nodes),
            requests=self._requests,
        )

    def _instance(self, name: str, node: str) -> _Instance:
        found = self._instances.get(name)
        if found is None:
            found = self._instances[name] = _Instance(node)
        return found

    def _balance(self, name: str, lost_us: int, live: Mapping[str, str]) -> InstanceBalance:
        instance = self._instances[name]
        missing_us = instance.busy_us - instance.used_us - lost_us
        why = self._fault(name, instance)
        if why:
            verdict = Verdict.WRONG
        elif not missing_us:
            verdict = Verdict.EXACT
        elif name in live:
            verdict = Verdict.OPEN
        elif instance.unwritten:
            verdict, why = Verdict.OPEN, "its node is gone and the last of it is not written yet"
        elif instance.itemised and 0 < missing_us <= instance.busy_us - instance.over_us:
            verdict, why = Verdict.OPEN, "calls that ended with it are not recorded yet"
        else:
            verdict = Verdict.WRONG
        return InstanceBalance(
            instance_id=name,
            node=instance.node,
            busy_us=instance.busy_us,
            used_us=instance.used_us,
            lost_us=lost_us,
            verdict=verdict,
            why=why,
        )

    def _fault(self, name: str, instance: _Instance) -> str:
        """What is wrong for sure, whatever is still to be written."""
        if instance.fault:
            return instance.fault
        if not instance.chained:
            return "its intervals do not follow each other"
        for call_id, (metered_us, recorded) in instance.settled_us.items():
            if max(recorded, self._lost.used_us(call_id, name)) != metered_us:
                return f"the settled call {call_id} used {metered_us} us, and its record says {recorded}"
        return ""

    def _node(self, node: str, open_nodes: set[str]) -> NodeBalance:
        present_us = allocated_us = 0
        verdict = Verdict.EXACT
        for process, times in self._presence.items():
            if process[0] != node:
                continue
            present, allocated = presence_us(times), sum(us for _, _, us in times)
            over_us, tolerance_us = allocated - present, len(times) * TOLERANCE_US
            if abs(over_us) > tolerance_us and verdict is not Verdict.WRONG:
                # Of instances that share a node, the intervals are cut at different times.
                waits = node in open_nodes and (over_us < 0 or not process[1])
                verdict = Verdict.OPEN if waits else Verdict.WRONG
            present_us, allocated_us = present_us + present, allocated_us + allocated
        return NodeBalance(node=node, present_us=present_us, allocated_us=allocated_us, verdict=verdict)


def conservation(
    records: Iterable[RequestRecord],
    intervals: Iterable[InstanceInterval],
    lost: Iterable[LostCall],
    *,
    live: Mapping[str, str] = NOBODY,
) -> Conservation:
    """The balance of a whole ledger; see `Balances`."""
    records, intervals = list(records), list(intervals)
    balances = Balances()
    balances.add_intervals(intervals)
    of_call = {part.call_id: record for record in records for part in record.gpu}
    for interval in intervals:
        for part in interval.calls:
            if part.over:
                balances.add_settled(interval.instance_id, part, of_call.get(part.call_id))
    balances.add_lost(lost)
    for record in records:
        balances.add(record)
    return balances.result(live=live)


def presence_us(times: Iterable[tuple[int, int, int]]) -> int:
    """How long there was at least one of the instances: begin and end of each stay, and what it got."""
    present_us, covered_us = 0, None
    for from_us, to_us, _ in sorted(times):
        begin_us = from_us if covered_us is None else max(from_us, covered_us)
        present_us += max(0, to_us - begin_us)
        covered_us = max(begin_us, to_us)
    return present_us


def micros(at: float) -> int:
    """Unix seconds as whole microseconds."""
    return round(at * 1e6)
