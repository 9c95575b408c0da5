"""Instances, host memory and casts over time, from the platform's change feed."""

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness.feed_monitor import FeedMonitor
from registry.records.change import CastChanged, Change, InstanceChanged, LiveChanged, NodeUp, Snapshot
from registry.records.instance import InstanceRecord, InstanceState
from registry.records.node import NodeRecord, Tier

_REASONS = 5
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
    """The planner of each cast and the live mode at each change, with reasons; how instances started.

    `sources` are where the models of these came from: host, node, disk (the store's folder), arena.
    `instances_per_node` is the most that one node had at once.
    """

    casts: dict[str, tuple[str, str]] = field(default_factory=dict)
    live: dict[tuple[str, int], tuple[str, str]] = field(default_factory=dict)
    starts: dict[str, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    instances_per_node: int = 0

    def record(self) -> dict[str, Any]:
        """Return the numbers of each kind, and some reasons."""
        return {
            "planners": dict(Counter(name for name, _ in self.casts.values())),
            "planner_reasons": _some(reason for _, reason in self.casts.values()),
            "live_modes": dict(Counter(name for name, _ in self.live.values())),
            "live_reasons": _some(reason for _, reason in self.live.values()),
            "starts": dict(Counter(self.starts.values())),
            "start_sources": dict(Counter(self.sources.values())),
            "instances_per_node": self.instances_per_node,
        }


def _some(reasons: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(reasons))[:_REASONS]


class UsageMonitor(FeedMonitor):
    """Follows what the platform uses."""

    def __init__(self, redis_url: str) -> None:
        super().__init__(redis_url)
        self.samples: list[UsageSample] = []
        self.plans = SeenPlans()
        self._instances: dict[str, InstanceRecord] = {}
        self._nodes: dict[str, NodeRecord] = {}
        self._earlier: frozenset[str] = frozenset()

    def on_snapshot(self, snapshot: Snapshot) -> None:
        """Take nodes and instances."""
        for up in snapshot.nodes:
            self._nodes[up.record.id] = up.record
        for instance in snapshot.instances:
            self._instance(instance)
        self._earlier = frozenset(self._instances)
        self.plans = SeenPlans()  # of what happens from now on
        self._note()

    def on_change(self, change: Change) -> None:
        """Take a change of what is in use, or of a plan."""
        if isinstance(change, InstanceChanged):
            self._instance(change.record)
        elif isinstance(change, NodeUp):
            self._nodes[change.record.id] = change.record
        elif isinstance(change, CastChanged):
            self.plans.casts[change.record.cast_id] = (change.record.planner, change.record.reason)
        elif isinstance(change, LiveChanged):
            live = change.record
            self.plans.live[live.function, live.serial] = (live.way.value, live.reason)
        self._note()

    def _instance(self, record: InstanceRecord) -> None:
        if record.state in _ENDED:
            self._instances.pop(record.instance_id, None)
        else:
            self._instances[record.instance_id] = record
            if record.instance_id not in self._earlier:
                self.plans.starts[record.instance_id] = record.start_kind.value
                if record.source:
                    self.plans.sources[record.instance_id] = record.source.partition(":")[0]

    def _note(self) -> None:
        nodes, states = self._nodes.values(), [one.state for one in self._instances.values()]
        on_nodes = Counter(one.node for one in self._instances.values())
        most = max(on_nodes.values(), default=0)
        self.plans.instances_per_node = max(self.plans.instances_per_node, most)
        sample = UsageSample(
            at_s=time.monotonic(),
            allocated=len(states),
            ready=sum(state is InstanceState.READY for state in states),
            host_bytes=sum(held.bytes for node in nodes for held in node.holdings if Tier.HOST in held.tiers),
            cast_bytes=sum(node.counters.get("cast_recv_bytes", 0) for node in nodes),
        )
        self.samples.append(sample)
