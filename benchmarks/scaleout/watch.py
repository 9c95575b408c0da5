"""What serves during a burst, from the platform's change feed."""

import time
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.feed_monitor import FeedMonitor
from registry.records.change import Change, InstanceChanged, LiveChanged, Snapshot
from registry.records.instance import InstanceRecord, InstanceState
from registry.records.live import LiveMode, LivePipeline, LiveRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingReplica:
    """An instance, or a pipeline with `stages` of (node, first layer, end layer).

    `rate` is its throughput by the platform's estimate, in whole nodes.
    """

    name: str
    rate: float
    stages: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSet:
    """The pipelines and the nodes with a ready instance that serve from `at_s` on."""

    at_s: float
    pipelines: tuple[ServingReplica, ...]
    ready: tuple[str, ...]

    def since(self, started_s: float, slower: int) -> "ServingSet":
        """Return this in model time since `started_s`."""
        at_s = max(0.0, (self.at_s - started_s) / slower)
        return ServingSet(at_s=at_s, pipelines=self.pipelines, ready=self.ready)


class ServingMonitor(FeedMonitor):
    """Follows what serves; times are the monotonic clock's."""

    def __init__(self, redis_url: str) -> None:
        super().__init__(redis_url)
        self.seen: list[ServingSet] = []
        self._pipelines: dict[tuple[str, int], tuple[LivePipeline, ...]] = {}
        self._ready: dict[str, str] = {}

    def on_snapshot(self, snapshot: Snapshot) -> None:
        """Take the instances and live records."""
        for instance in snapshot.instances:
            self._instance(instance)
        for live in snapshot.live:
            self._live(live.record)
        self._note()

    def on_change(self, change: Change) -> None:
        """Take a change of an instance or a live record."""
        if isinstance(change, InstanceChanged):
            self._instance(change.record)
        elif isinstance(change, LiveChanged):
            self._live(change.record)
        else:
            return
        self._note()

    def _instance(self, record: InstanceRecord) -> None:
        if record.state is InstanceState.READY:
            self._ready[record.instance_id] = record.node
        else:
            self._ready.pop(record.instance_id, None)

    def _live(self, record: LiveRecord) -> None:
        self._pipelines[record.function, record.version] = record.pipelines

    def _note(self) -> None:
        serving = ServingSet(
            at_s=time.monotonic(),
            pipelines=tuple(
                ServingReplica(
                    name=one.name,
                    rate=one.rate,
                    stages=tuple((stage.node, stage.first, stage.last) for stage in one.stages),
                )
                for pipelines in self._pipelines.values()
                for one in pipelines
                # A ZigZag pair is its instance; a node that loads alone makes no tokens before.
                if one.way is not LiveMode.ZIGZAG and len(one.stages) > 1
            ),
            ready=tuple(sorted(self._ready.values())),
        )
        if not self.seen or (serving.pipelines, serving.ready) != (
            self.seen[-1].pipelines,
            self.seen[-1].ready,
        ):
            self.seen.append(serving)


def serving_record(serving: ServingSet) -> dict[str, Any]:
    """Return the set as it appears in a record."""
    return {
        "at_s": round(serving.at_s, 4),
        "pipelines": [
            {"name": one.name, "rate": round(one.rate, 3), "stages": one.stages} for one in serving.pipelines
        ],
        "ready": serving.ready,
    }
