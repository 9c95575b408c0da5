"""A cache of the cluster state: a fold of the change feed over a snapshot. Pure, no I/O.

Time is the caller's monotonic clock. A node is *usable* while its lease is valid, it is not draining, and its
channel is up: a broken channel takes it out of routing at once, until a new one connects. ClusterStateSync
expires leases, and only while the feed is alive, so that routing continues during an outage of Redis.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from gateway.cluster.backoff import BackoffTable
from gateway.cluster.cast_cache import CastCache
from gateway.cluster.cast_tracker import CastTracker
from gateway.cluster.entries import NodeEntry, ReceivedScaleRequest
from gateway.cluster.link_rates import LinkRateCache
from gateway.cluster.live_cache import LiveStateCache
from gateway.cluster.node_index import NodeIndex
from gateway.cluster.node_space import holds
from gateway.cluster.replicas import PipelineReplica, Replica
from registry.records.change import (
    CastChanged,
    CastPartEnded,
    Change,
    FunctionChanged,
    FunctionDeleted,
    InstanceChanged,
    LiveChanged,
    LoadReport,
    NodeGone,
    NodeUp,
    ScaleRequested,
    Snapshot,
)
from registry.records.fence import NO_FENCE
from registry.records.function import Function, FunctionVersion
from registry.records.instance import InstanceRecord, InstanceState
from registry.records.node import NodeRecord, Tier
from registry.records.rollout import Rollout

# After an outage of Redis, or a stall of this process, every node has this long to send a heartbeat.
GRACE_S = 3.0
STARTING_STATES = frozenset({InstanceState.STARTING, InstanceState.LOADING})
_READY_STATES = frozenset({InstanceState.READY})
FINAL_STATES = frozenset({InstanceState.STOPPED, InstanceState.FAILED})
_MAX_SCALE_REQUESTS = 64
_MAX_KILLED = 256  # nodes


class VersionKey(NamedTuple):
    """The key of one version of one function, by which calls are routed."""

    function: str
    version: int

    def __str__(self) -> str:
        return f"{self.function}:{self.version}"


class ClusterStateCache:
    """Functions, nodes, instances, load reports, casts and live serving of the cluster, as last reported."""

    def __init__(self, links: LinkRateCache | None = None, backoff: BackoffTable | None = None) -> None:
        self.cursor = ""
        # Since when the feed is disconnected, None while it is followed.
        self.disconnected_s: float | None = None
        # Whether an expired node is back, of which only a snapshot has the instances.
        self.needs_snapshot = False
        self.functions: dict[str, Function] = {}
        self.rollouts: dict[str, Rollout] = {}  # those in progress, by function
        self.scale_requests: deque[ReceivedScaleRequest] = deque(maxlen=_MAX_SCALE_REQUESTS)
        self.casts = CastCache()
        self.cast_tracker = CastTracker()
        self.link_rates = links or LinkRateCache()
        self.cast_tracker.subscribe(lambda end: self.link_rates.on_cast_ended(end.record))
        self.live = LiveStateCache()
        # Its log has the failed starts of the cluster; the controller adds what they mean for the next ones.
        self.backoff = backoff or BackoffTable()
        self._versions: dict[VersionKey, FunctionVersion] = {}
        self._by_image: dict[str, dict[VersionKey, None]] = {}
        self.index = NodeIndex(self._image_of)
        self._nodes: dict[str, NodeEntry] = {}
        self.fence = NO_FENCE  # the greatest one of a controller that any node has reported
        self._expired: dict[str, int] = {}  # node -> its epoch when its lease expired
        self._instances: dict[str, InstanceRecord] = {}
        self._by_key: dict[VersionKey, dict[str, InstanceRecord]] = {}
        self._ready: dict[VersionKey, list[InstanceRecord]] = {}  # computed since the last change
        self._killed: dict[str, set[VersionKey]] = {}  # nodes, with what they ran then; they may be back
        self._draining: set[str] = set()
        self._load_reports: dict[str, tuple[LoadReport, float]] = {}  # with their deadlines
        self._on_start: list[Callable[[InstanceRecord], None]] = []

    def __repr__(self) -> str:
        usable = sum(1 for _ in self.usable_nodes())
        return (
            f"<State cache cursor={self.cursor!r} functions={len(self.functions)} "
            f"nodes={usable}/{len(self._nodes)} instances={len(self._instances)}>"
        )

    def subscribe_ready(self, callback: Callable[[InstanceRecord], None]) -> None:
        """Call `callback` with each instance that becomes ready while the feed is followed."""
        self._on_start.append(callback)

    # --- the fold

    def load(self, snapshot: Snapshot, now: float) -> None:
        """Replace all state by a snapshot.

        A node that the snapshot lacks but whose channel is up stays, with its instances, for one more
        lease, and no lease expires at once: after an outage of Redis heartbeats may be late.
        """
        self.disconnected_s, self.needs_snapshot, self._expired = None, False, {}
        before, held = self._nodes, self._instances
        self.cursor = snapshot.cursor
        self.functions, self.rollouts = {}, {}
        for function in snapshot.functions:
            self._put_function(function)
        self._versions, self._by_image, self.index = {}, {}, NodeIndex(self._image_of)
        for version in snapshot.versions:
            self.put_version(version)
        self._nodes, self._instances, self._by_key, self._load_reports = {}, {}, {}, {}
        for up in snapshot.nodes:
            self.fence = max(self.fence, up.record.controller)
            entry = _entry(up, before.get(up.record.id), now + max(up.ttl_s, GRACE_S))
            self._set_entry(up.record.id, entry)
        kept = {id_: e for id_, e in before.items() if id_ not in self._nodes and e.reached}
        for id_, entry in kept.items():
            self._set_entry(id_, replace(entry, deadline_s=now + max(entry.ttl_s, GRACE_S)))
        for id_, entry in before.items():
            if id_ not in self._nodes or self._nodes[id_].record.epoch > entry.record.epoch:
                self.cast_tracker.on_node_lost(id_, now)
        for instance in held.values():
            if instance.node in kept:
                self._put_instance(instance)
        for instance in snapshot.instances:
            self._put_instance(instance)
        self._draining &= self._instances.keys()
        self._ready.clear()
        for demand in snapshot.load_reports:
            self._put_load_report(demand, now)
        self.casts = CastCache(snapshot.casts)
        self.live.load(snapshot.live, now, GRACE_S)
        for request in snapshot.scale_requests:
            self._put_scale_request(request, now)

    def apply(self, change: Change, now: float) -> None:
        """Apply one change of the feed."""
        match change:
            case NodeUp():
                self._put_node(change, now)
            case NodeGone(id=id_, epoch=epoch):
                entry = self._nodes.get(id_)
                if entry is not None and entry.record.epoch <= epoch:
                    self._remove_node(id_, now)
            case InstanceChanged(record=record):
                self._change_instance(record)
            case FunctionChanged(function=function, version=version):
                self._put_function(function)
                self.put_version(version)
            case FunctionDeleted(name=name):
                self.functions.pop(name, None)
                self.rollouts.pop(name, None)
                for key in [key for key in self._versions if key.function == name]:
                    self._set_version(key, None)
            case LoadReport():
                self._put_load_report(change, now)
            case ScaleRequested():
                self._put_scale_request(change, now)
            case CastChanged(record=record):
                self.casts.update(record)
                self.cast_tracker.on_cast(record, now)
            case CastPartEnded(progress=progress):
                self.link_rates.on_part_ended(progress)
                self.cast_tracker.on_part_ended(progress, now)
            case LiveChanged():
                self.live.update(change, now)

    def expire(self, now: float) -> bool:
        """Remove expired nodes, load reports and live records; return whether there were any."""
        nodes = [id_ for id_, entry in self._nodes.items() if entry.deadline_s <= now]
        for id_ in nodes:
            self._expired[id_] = self._nodes[id_].record.epoch
            self._remove_node(id_, now)
        gateways = [name for name, (_, deadline_s) in self._load_reports.items() if deadline_s <= now]
        for gateway in gateways:
            del self._load_reports[gateway]
        live = self.live.expire(now)
        return bool(nodes or gateways or live)

    def postpone(self, until: float) -> None:
        """Extend all leases to `until` at least: heartbeats were not read for a while."""
        for id_, entry in self._nodes.items():
            self._nodes[id_] = replace(entry, deadline_s=max(entry.deadline_s, until))
        self.live.postpone(until)

    def next_expiry(self) -> float | None:
        """Return when the next lease expires, None if never."""
        deadlines = [entry.deadline_s for entry in self._nodes.values()]
        deadlines += [deadline_s for _, deadline_s in self._load_reports.values()]
        return min(deadlines + self.live.deadlines, default=None)

    def channel_up(self, node: str, epoch: int) -> None:
        """Record that a channel to this epoch of the node is up."""
        self._set_channel(node, epoch)

    def channel_down(self, node: str) -> None:
        """Record that the channel to the node is broken."""
        self._set_channel(node, 0)

    def refresh(self, record: NodeRecord) -> None:
        """Replace a node's record by one read from the node itself; its lease is unchanged."""
        entry = self._nodes.get(record.id)
        if entry is not None and entry.record.epoch == record.epoch:
            self._set_entry(record.id, replace(entry, record=record))

    def put_version(self, version: FunctionVersion) -> None:
        """Add a version that the feed did not carry."""
        self._set_version(VersionKey(version.function, version.version), version)

    def put_function(self, head: Function, current: FunctionVersion) -> None:
        """Replace a function's head by one that was just stored, before the feed brings it."""
        if head.name in self.functions:
            self._put_function(head)
            self.put_version(current)

    def set_draining(self, instance_id: str, draining: bool) -> None:
        """Take an instance out of routing before its node reports it as draining, or put it back."""
        if draining:
            self._draining.add(instance_id)
        else:
            self._draining.discard(instance_id)
        self._ready.clear()

    # --- queries

    def version(self, key: VersionKey) -> FunctionVersion | None:
        return self._versions.get(key)

    def current(self, function: str) -> FunctionVersion | None:
        head = self.functions.get(function)
        return None if head is None else self._versions.get(VersionKey(function, head.current))

    def served(self, function: str) -> list[FunctionVersion]:
        """Return the current version, and the one that is being rolled out."""
        head = self.functions.get(function)
        found = () if head is None else (self._versions.get(VersionKey(function, one)) for one in head.served)
        return [version for version in found if version is not None]

    def judged_versions(self) -> list[VersionKey]:
        """Return the versions that rollouts in progress compare."""
        return [
            VersionKey(function, number)
            for function, rollout in self.rollouts.items()
            for number in (rollout.stable, rollout.plan.candidate)
        ]

    def versions(self, image: str | None = None) -> list[FunctionVersion]:
        """Return the versions with this image, all without it."""
        keys = self._versions if image is None else self._by_image.get(image, ())
        return [self._versions[key] for key in keys]

    def node(self, id_: str) -> NodeEntry | None:
        return self._nodes.get(id_)

    def nodes(self) -> list[NodeEntry]:
        return list(self._nodes.values())

    def usable_nodes(self) -> Iterator[NodeRecord]:
        return iter(self.index.usable.values())

    def killed_nodes(self, function: str, since_version: int) -> dict[str, bool]:
        """Return the nodes that went while they ran the function, and whether each is back."""
        return {
            node: node in self._nodes
            for node, keys in self._killed.items()
            if any(key.function == function and key.version >= since_version for key in keys)
        }

    def instance(self, instance_id: str) -> InstanceRecord | None:
        return self._instances.get(instance_id)

    def is_emptying(self, instance_id: str) -> bool:
        """Return whether an instance takes no more calls, but may run some: it is paused, or drains."""
        record = self._instances.get(instance_id)
        return instance_id in self._draining or (
            record is not None and record.state is InstanceState.DRAINING
        )

    def instances(self, key: VersionKey | None = None) -> list[InstanceRecord]:
        return list((self._instances if key is None else self._by_key.get(key, {})).values())

    def instance_keys(self) -> list[VersionKey]:
        return [key for key, held in self._by_key.items() if held]

    def ready(self, key: VersionKey) -> Sequence[InstanceRecord]:
        """Return the instances that calls may be sent to."""
        ready = self._ready.get(key)
        if ready is None:
            ready = self._ready[key] = self._in_states(key, _READY_STATES)
        return ready

    def pipelines(self, key: VersionKey) -> Sequence[PipelineReplica]:
        """Return the pipelines that calls may be sent to."""
        return self.live.replicas(key.function, key.version, self._usable)

    def replicas(self, key: VersionKey) -> Sequence[Replica]:
        """Return all replicas of the version: ready instances, and pipelines of loading ones.

        An instance that is helped by a ZigZag pair is reached through the pair only; one that loaded alone
        serves its calls itself once it is ready.
        """
        pipelines = self.pipelines(key)
        if not pipelines:
            return self.ready(key)
        sources = [server.pipeline.source for server in pipelines]
        helped = {source.instance_id for source in sources if source is not None}
        ready = [one for one in self.ready(key) if one.instance_id not in helped]
        whole = {one.instance_id for one in ready}
        return [
            *ready,
            *(one for one in pipelines if not (one.pipeline.is_alone and one.head.instance_id in whole)),
        ]

    def starting(self, key: VersionKey) -> list[InstanceRecord]:
        """Return the instances that are starting on usable nodes."""
        return self._in_states(key, STARTING_STATES)

    def holders(self, image: str, tier: Tier) -> list[NodeRecord]:
        """Return the usable nodes of which `tier` holds the complete image."""
        return [record for record in self.index.with_image(image) if holds(record, image, tier)]

    def load_reports(self, *, exclude: str = "") -> Iterator[LoadReport]:
        """Yield the reports of gateways, without the gateway `exclude`."""
        for gateway, (report, _) in self._load_reports.items():
            if gateway != exclude:
                yield report

    def view(self) -> Snapshot:
        return Snapshot(
            cursor=self.cursor,
            functions=tuple(self.functions.values()),
            versions=tuple(self._versions.values()),
            nodes=tuple(NodeUp(record=e.record, ttl_s=e.ttl_s) for e in self._nodes.values()),
            instances=tuple(self._instances.values()),
            load_reports=tuple(report for report, _ in self._load_reports.values()),
            casts=tuple(self.casts),
            live=tuple(LiveChanged(record=record, ttl_s=0.0) for record in self.live),
        )

    # --- inside

    def _put_function(self, function: Function) -> None:
        self.functions[function.name] = function
        if (rollout := function.active_rollout) is not None:
            self.rollouts[function.name] = rollout
        else:
            self.rollouts.pop(function.name, None)

    def _usable(self, node: str) -> bool:
        return node in self.index.usable

    def _image_of(self, instance: InstanceRecord) -> str | None:
        version = self._versions.get(VersionKey(instance.function, instance.version))
        return None if version is None else version.image

    def _set_version(self, key: VersionKey, version: FunctionVersion | None) -> None:
        """Add, replace or, with None, remove a version."""
        old = self._versions.get(key)
        before = None if old is None else old.image
        after = None if version is None else version.image
        if version is None:
            self._versions.pop(key, None)
        else:
            self._versions[key] = version
        if before != after:
            if before is not None:
                del self._by_image[before][key]
                if not self._by_image[before]:
                    del self._by_image[before]
            if after is not None:
                self._by_image.setdefault(after, {})[key] = None
            self.index.on_images_changed(one.node for one in self.instances(key))

    def _set_entry(self, id_: str, entry: NodeEntry) -> None:
        self._nodes[id_] = entry
        if entry.usable is not self._usable(id_):
            self._ready.clear()
        if entry.usable:
            self.index.put(entry.record)
        else:
            self.index.remove(id_)

    def _in_states(self, key: VersionKey, states: Collection[InstanceState]) -> list[InstanceRecord]:
        """Return the instances in these states that are on usable nodes and not about to stop.

        Of a group that is the member which takes its calls.
        """
        return [
            instance
            for instance in self._by_key.get(key, {}).values()
            if instance.state in states
            and instance.takes_calls
            and instance.instance_id not in self._draining
            and self._usable(instance.node)
        ]

    def _put_node(self, up: NodeUp, now: float) -> None:
        self.fence = max(self.fence, up.record.controller)
        known = self._nodes.get(up.record.id)
        if known is not None and up.record.epoch < known.record.epoch:
            return
        if known is not None and up.record.epoch > known.record.epoch:
            self._remove_instances(up.record.id)
            self.cast_tracker.on_node_lost(up.record.id, now)
        if known is None and self._expired.pop(up.record.id, None) == up.record.epoch:
            self.needs_snapshot = True
        self._set_entry(up.record.id, _entry(up, known, now + up.ttl_s))

    def _set_channel(self, node: str, epoch: int) -> None:
        entry = self._nodes.get(node)
        if entry is not None:
            self._set_entry(node, replace(entry, channel_epoch=epoch))

    def _remove_node(self, id_: str, now: float) -> None:
        del self._nodes[id_]
        self.index.remove(id_)
        self._ready.clear()
        self.cast_tracker.on_node_lost(id_, now)
        self._remove_instances(id_)

    def _remove_instances(self, node: str) -> None:
        instances = list(self.index.instances_on(node))
        if instances:
            self._killed.pop(node, None)
            self._killed[node] = {VersionKey(one.function, one.version) for one in instances}
        if len(self._killed) > _MAX_KILLED:
            del self._killed[next(iter(self._killed))]
        for instance in instances:
            self._drop_instance(instance)

    def _change_instance(self, record: InstanceRecord) -> None:
        key = VersionKey(record.function, record.version)
        known = self._instances.get(record.instance_id)
        # A start without room may succeed on another node: the controller publishes the final failure.
        failed = record.state is InstanceState.FAILED and not record.no_room
        if failed and (known is None or known.state in STARTING_STATES):
            self.backoff.log(key, record.instance_id, record.node, record.error or "no reason given")
        if record.state is InstanceState.READY and record.takes_calls:
            self.backoff.clear_log(key)
            if known is None or known.state in STARTING_STATES:
                for callback in self._on_start:
                    callback(record)
        if record.state in FINAL_STATES:
            if known is not None:
                self._drop_instance(known)
        else:
            self._put_instance(record)

    def _put_instance(self, record: InstanceRecord) -> None:
        known = self._instances.get(record.instance_id)
        if known is not None and known.node != record.node:
            self.index.drop_instance(known)
        self._instances[record.instance_id] = record
        self.index.put_instance(record)
        key = VersionKey(record.function, record.version)
        self._by_key.setdefault(key, {})[record.instance_id] = record
        self._ready.clear()

    def _drop_instance(self, record: InstanceRecord) -> None:
        key = VersionKey(record.function, record.version)
        del self._instances[record.instance_id]
        self.index.drop_instance(record)
        del self._by_key[key][record.instance_id]
        if not self._by_key[key]:
            del self._by_key[key]
        self._draining.discard(record.instance_id)
        self._ready.clear()

    def _put_scale_request(self, change: ScaleRequested, now: float) -> None:
        target = change.target
        if all(known.target.token != target.token for known in self.scale_requests):
            self.scale_requests.append(ReceivedScaleRequest(target=target, deadline_s=now + change.ttl_s))

    def _put_load_report(self, change: LoadReport, now: float) -> None:
        if change.loads:
            self._load_reports[change.gateway] = change, now + change.ttl_s
        else:
            self._load_reports.pop(change.gateway, None)


def _entry(up: NodeUp, known: NodeEntry | None, deadline_s: float) -> NodeEntry:
    channel_epoch = known.channel_epoch if known else 0
    return NodeEntry(record=up.record, ttl_s=up.ttl_s, deadline_s=deadline_s, channel_epoch=channel_epoch)
