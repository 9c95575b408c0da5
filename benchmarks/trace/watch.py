"""Instances, host memory and casts over time, from the platform's change feed."""

import time
from collections import Counter
from dataclasses import dataclass, field

from benchmarks.harness.feed_monitor import FeedMonitor
from registry.records.change import CastChanged, Change, InstanceChanged, LiveChanged, NodeUp, Snapshot
from registry.records.instance import InstanceRecord, InstanceState
from registry.records.node import NodeRecord, Tier

_ENDED = (InstanceState.STOPPED, InstanceState.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageSample:
    """What is in use from `at_s` of the monotonic clock on: instances on accelerators, ready ones, bytes."""

    at_s: float
    allocated: int
    ready: int
    host_bytes: int
    cast_bytes: int


@dataclass(slots=True)
class SeenPlans:
    """How often each planner and live mode was chosen, by reason, and how each instance started."""

    casts: dict[str, str] = field(default_factory=dict)
    live: dict[tuple[str, int], str] = field(default_factory=dict)
    starts: dict[str, str] = field(default_factory=dict)

    def record(self) -> dict[str, dict[str, int]]:
        seen = {"casts": self.casts, "live": self.live, "starts": self.starts}
        return {name: dict(Counter(found.values()).most_common(8)) for name, found in seen.items()}


class UsageMonitor(FeedMonitor):
    """Follows what the platform uses."""

    def __init__(self, redis_url: str) -> None:
        super().__init__(redis_url)
        self.samples: list[UsageSample] = []
        self.plans = SeenPlans()
        self._instances: dict[str, InstanceState] = {}
        self._nodes: dict[str, NodeRecord] = {}

    def on_snapshot(self, snapshot: Snapshot) -> None:
        """Take nodes and instances."""
        for up in snapshot.nodes:
            self._nodes[up.record.id] = up.record
        for instance in snapshot.instances:
            self._instance(instance)
        self.plans = SeenPlans()  # of what happens from now on
        self._note()

    def on_change(self, change: Change) -> None:
        """Take a change of what is in use, or of a plan."""
        if isinstance(change, InstanceChanged):
            self._instance(change.record)
        elif isinstance(change, NodeUp):
            self._nodes[change.record.id] = change.record
        elif isinstance(change, CastChanged):
            self.plans.casts[change.record.cast_id] = f"{change.record.planner}: {change.record.reason}"
        elif isinstance(change, LiveChanged):
            live = change.record
            if live.way is not None and live.pipelines:
                self.plans.live[live.function, live.serial] = f"{live.way}: {live.reason}"
        self._note()

    def _instance(self, record: InstanceRecord) -> None:
        if record.state in _ENDED:
            self._instances.pop(record.instance_id, None)
        else:
            self._instances[record.instance_id] = record.state
            self.plans.starts[record.instance_id] = record.start_kind.value

    def _note(self) -> None:
        nodes, states = self._nodes.values(), self._instances.values()
        sample = UsageSample(
            at_s=time.monotonic(),
            allocated=len(states),
            ready=sum(state is InstanceState.READY for state in states),
            host_bytes=sum(held.bytes for node in nodes for held in node.holdings if Tier.HOST in held.tiers),
            cast_bytes=sum(node.counters.get("cast_recv_bytes", 0) for node in nodes),
        )
        self.samples.append(sample)
