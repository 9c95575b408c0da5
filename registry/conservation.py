"""Whether the ledger adds up: what instances were busy for is what requests were told they used. Pure.

For each instance, in whole microseconds, busy = what the records' slices name + what was lost. For each
node, what its instances were allocated is the time in which there was one, within 1 ms an interval.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from registry.usage import InstanceInterval, LostCall, RequestRecord

# What gateway's and node's clocks may differ by where their times are compared.
SKEW_S = 2.0
# Metered time and the clock's are both rounded, an interval.
TOLERANCE_US = 1000

NOBODY: Mapping[str, str] = {}


class Verdict(StrEnum):
    EXACT = "exact"
    OPEN = "open"  # not to be told yet: calls are in flight, or the interval that holds them is
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

    def unseen(self) -> set[str]:
        """The ids of requests of which no record came by."""
        missing = (
            call_id for call_id, instance in self._calls if (call_id, instance) not in self._recorded_us
        )
        return {call_id.partition("/")[0] for call_id in missing}

    def unrecorded(self) -> list[tuple[LostCall, int]]:
        """Each call with the microseconds that no record has."""
        found = []
        for name, calls in self._calls.items():
            recorded_us = self._recorded_us.get(name, 0)
            for call in calls:
                found.append((call, max(0, call.used_us - recorded_us)))
                recorded_us = max(0, recorded_us - call.used_us)
        return found


class Balances:
    """Adds up a ledger: feed it all intervals, then all lost calls, then each record."""

    def __init__(self) -> None:
        self._lost = LostCalls(())
        self._busy_us: dict[str, int] = defaultdict(int)
        self._node: dict[str, str] = {}
        self._until: dict[str, float] = {}
        self._presence: dict[str, list[InstanceInterval]] = defaultdict(list)
        self._used_us: dict[str, int] = defaultdict(int)
        self._metered_us: dict[str, int] = defaultdict(int)
        self._requests = 0

    def add_intervals(self, intervals: Iterable[InstanceInterval]) -> None:
        """Count what instances were allocated."""
        for interval in intervals:
            name = interval.instance_id
            self._busy_us[name] += interval.busy_us
            self._node[name] = interval.node
            self._until[name] = max(interval.to_at, self._until.get(name, interval.to_at))
            self._presence[interval.node].append(interval)

    def add_lost(self, lost: Iterable[LostCall]) -> None:
        """Note all calls that nodes thought lost."""
        self._lost = LostCalls(lost)

    def add(self, record: RequestRecord) -> None:
        """Count a request."""
        self._requests += 1
        self._lost.add(record)
        for part in record.gpu:
            name = part.instance_id
            self._used_us[name] += part.gpu_us
            self._node.setdefault(name, part.node)
            if record.ended_at < self._until.get(name, 0.0) - SKEW_S:
                self._metered_us[name] += part.gpu_us

    def result(self, *, live: Mapping[str, str] = NOBODY) -> Conservation:
        """The balance of everything so far.

        `live` are instances, with their nodes, that may have calls in flight, or time not written down yet.
        """
        lost_us: dict[str, int] = defaultdict(int)
        for call, unrecorded_us in self._lost.unrecorded():
            lost_us[call.instance_id] += unrecorded_us
            self._node.setdefault(call.instance_id, call.node)
        return Conservation(
            instances=tuple(self._instance(name, lost_us[name], live) for name in sorted(self._node)),
            nodes=tuple(self._balance(node, live) for node in sorted(self._presence)),
            requests=self._requests,
        )

    def _instance(self, name: str, lost_us: int, live: Mapping[str, str]) -> InstanceBalance:
        busy_us, used_us = self._busy_us[name], self._used_us[name]
        missing_us = busy_us - used_us - lost_us
        if not missing_us:
            verdict = Verdict.EXACT
        elif name in live and self._metered_us[name] <= busy_us:
            verdict = Verdict.OPEN
        else:
            verdict = Verdict.WRONG
        return InstanceBalance(
            instance_id=name,
            node=self._node[name],
            busy_us=busy_us,
            used_us=used_us,
            lost_us=lost_us,
            verdict=verdict,
        )

    def _balance(self, node: str, live: Mapping[str, str]) -> NodeBalance:
        intervals = self._presence[node]
        present_us = presence_us(intervals)
        allocated_us = sum(interval.allocated_us for interval in intervals)
        if abs(present_us - allocated_us) <= len(intervals) * TOLERANCE_US:
            verdict = Verdict.EXACT
        elif node in live.values():
            verdict = Verdict.OPEN  # the intervals of instances that share it are cut at different times
        else:
            verdict = Verdict.WRONG
        return NodeBalance(node=node, present_us=present_us, allocated_us=allocated_us, verdict=verdict)


def conservation(
    records: Iterable[RequestRecord],
    intervals: Iterable[InstanceInterval],
    lost: Iterable[LostCall],
    *,
    live: Mapping[str, str] = NOBODY,
) -> Conservation:
    """The balance of a whole ledger; see `Balances`."""
    balances = Balances()
    balances.add_intervals(intervals)
    balances.add_lost(lost)
    for record in records:
        balances.add(record)
    return balances.result(live=live)


def presence_us(intervals: Iterable[InstanceInterval]) -> int:
    """How long there was at least one of the instances."""
    present_us, covered_us = 0, None
    for interval in sorted(intervals, key=lambda interval: interval.from_at):
        from_us, to_us = micros(interval.from_at), micros(interval.to_at)
        begin_us = from_us if covered_us is None else max(from_us, covered_us)
        present_us += max(0, to_us - begin_us)
        covered_us = max(begin_us, to_us)
    return present_us


def micros(at: float) -> int:
    """Unix seconds as whole microseconds."""
    return round(at * 1e6)
