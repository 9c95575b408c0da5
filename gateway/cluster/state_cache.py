"""What this gateway knows of the cluster: a fold of the change feed over a snapshot. Pure, no I/O.

Time is the caller's monotonic clock. A node is *usable* while its lease holds, it is not draining,
and its channel is up: a broken channel takes it out of routing at once, until a fresh one connects.
Leases are expired by whoever feeds the directory, and only while the feed is alive, so that routes
keep serving while Redis is away.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from gateway.cast_ends import CastEnds
from gateway.directory_entries import NodeEntry, RemoteDemand, StartFailure, Wish
from gateway.known_casts import KnownCasts
from gateway.known_live import KnownLive
from gateway.measured_links import MeasuredLinks
from gateway.servers import Server
from registry.change import (
    CastChanged,
    CastPartEnded,
    Change,
    Demand,
    DemandChanged,
    FunctionChanged,
    FunctionDeleted,
    InstanceChanged,
    LiveChanged,
    NodeGone,
    NodeUp,
    ScaleAsked,
    Snapshot,
)
from registry.function import Function, FunctionVersion
from registry.instance import InstanceRecord, InstanceState
from registry.node import NodeRecord, Tier

# After an outage of Redis, or of this process, every node has so long to be heard of again.
GRACE_S = 3.0
COMING = frozenset({InstanceState.STARTING, InstanceState.LOADING})
FINAL = frozenset({InstanceState.STOPPED, InstanceState.FAILED})
_KEPT_FAILURES = 64
_KEPT_WISHES = 64


class VersionKey(NamedTuple):
    """One version of one function: what calls are routed by."""

    function: str
    version: int

    def __str__(self) -> str:
        return f"{self.function}:{self.version}"


class Directory:
    def __init__(self, links: MeasuredLinks | None = None) -> None:
        self.cursor = ""
        # Since when the feed is cut off, None while it is followed.
        self.cut_off_s: float | None = None
        # Whether a node came back whose instances were dropped with it: only a snapshot tells of them.
        self.incomplete = False
        self.functions: dict[str, Function] = {}
        self.wishes: deque[Wish] = deque(maxlen=_KEPT_WISHES)
        self.casts = KnownCasts()
        self.cast_ends = CastEnds()
        self.links = links or MeasuredLinks()
        self.cast_ends.each(lambda end: self.links.over(end.record))
        self.live = KnownLive()
        self.failure_serial = 0
        self._versions: dict[VersionKey, FunctionVersion] = {}
        self._nodes: dict[str, NodeEntry] = {}
        self._lapsed: dict[str, int] = {}  # node -> its epoch when it was not heard of for too long
        self._instances: dict[str, InstanceRecord] = {}
        self._by_key: dict[VersionKey, dict[str, InstanceRecord]] = {}
        self._leaving: set[str] = set()
        self._demands: dict[str, RemoteDemand] = {}
        self._failures: dict[VersionKey, deque[StartFailure]] = {}
        self._on_start: list[Callable[[InstanceRecord], None]] = []

    def __repr__(self) -> str:
        usable = sum(1 for _ in self.usable_nodes())
        return (
            f"<Directory cursor={self.cursor!r} functions={len(self.functions)} "
            f"nodes={usable}/{len(self._nodes)} instances={len(self._instances)}>"
        )

    def each_start(self, callback: Callable[[InstanceRecord], None]) -> None:
        """Call it with each instance that becomes ready while the feed is followed."""
        self._on_start.append(callback)

    # --- the fold

    def load(self, snapshot: Snapshot, now: float) -> None:
        """Replace all by a snapshot.

        A node that the snapshot lacks but whose channel is up keeps its place and its instances for
        one more lease, and no lease ends at once: after an outage of Redis heartbeats may merely be late.
        """
        self.cut_off_s, self.incomplete, self._lapsed = None, False, {}
        before, held = self._nodes, self._instances
        self.cursor = snapshot.cursor
        self.functions = {f.name: f for f in snapshot.functions}
        self._versions = {VersionKey(v.function, v.version): v for v in snapshot.versions}
        self._nodes, self._instances, self._by_key, self._demands = {}, {}, {}, {}
        for up in snapshot.nodes:
            known = before.get(up.record.id)
            self._nodes[up.record.id] = NodeEntry(
                record=up.record,
                ttl_s=up.ttl_s,
                deadline_s=now + max(up.ttl_s, GRACE_S),
                channel_epoch=known.channel_epoch if known else 0,
            )
        kept = {id_: e for id_, e in before.items() if id_ not in self._nodes and e.reached}
        for id_, entry in kept.items():
            self._nodes[id_] = replace(entry, deadline_s=now + max(entry.ttl_s, GRACE_S))
        for id_, entry in before.items():
            if id_ not in self._nodes or self._nodes[id_].record.epoch > entry.record.epoch:
                self.cast_ends.lost(id_, now)
        for instance in held.values():
            if instance.node in kept:
                self._put_instance(instance)
        for instance in snapshot.instances:
            self._put_instance(instance)
        self._leaving &= self._instances.keys()
        for demand in snapshot.demands:
            self._put_demand(demand, now)
        self.casts = KnownCasts(snapshot.casts)
        self.live.load(snapshot.live, now, GRACE_S)

    def apply(self, change: Change, now: float) -> None:
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
                self.functions[function.name] = function
                self._versions[VersionKey(version.function, version.version)] = version
            case FunctionDeleted(name=name):
                self.functions.pop(name, None)
                self._versions = {k: v for k, v in self._versions.items() if k.function != name}
            case DemandChanged():
                self._put_demand(change, now)
            case ScaleAsked(target=target):
                self.wishes.append(Wish(target=target, arrived_s=now))
            case CastChanged(record=record):
                self.casts.put(record)
                self.cast_ends.changed(record, now)
            case CastPartEnded(progress=progress):
                self.links.told(progress)
                self.cast_ends.ended(progress, now)
            case LiveChanged():
                self.live.put(change, now)

    def expire(self, now: float) -> bool:
        """Drop nodes and demands whose time is up. Returns whether anything was."""
        nodes = [id_ for id_, entry in self._nodes.items() if entry.deadline_s <= now]
        for id_ in nodes:
            self._lapsed[id_] = self._nodes[id_].record.epoch
            self._remove_node(id_, now)
        gateways = [g for g, demand in self._demands.items() if demand.deadline_s <= now]
        for gateway in gateways:
            del self._demands[gateway]
        live = self.live.expire(now)
        return bool(nodes or gateways or live)

    def postpone(self, until: float) -> None:
        """Let no node's lease end before `until`: nobody has listened to heartbeats for a while."""
        for id_, entry in self._nodes.items():
            self._nodes[id_] = replace(entry, deadline_s=max(entry.deadline_s, until))
        self.live.postpone(until)

    def next_expiry(self) -> float | None:
        """When `expire` next has something to do, None if never."""
        deadlines = [entry.deadline_s for entry in self._nodes.values()]
        deadlines += [demand.deadline_s for demand in self._demands.values()]
        return min(deadlines + self.live.deadlines, default=None)

    def reach(self, node: str, epoch: int) -> None:
        """A channel to this epoch of the node is up."""
        self._set_channel(node, epoch)

    def suspect(self, node: str) -> None:
        """The channel to the node broke."""
        self._set_channel(node, 0)

    def refresh(self, record: NodeRecord) -> None:
        """A node's own fresh record, newer than its heartbeat; its lease stays as it was."""
        entry = self._nodes.get(record.id)
        if entry is not None and entry.record.epoch == record.epoch:
            self._nodes[record.id] = NodeEntry(
                record=record,
                ttl_s=entry.ttl_s,
                deadline_s=entry.deadline_s,
                channel_epoch=entry.channel_epoch,
            )

    def put_version(self, version: FunctionVersion) -> None:
        """Learn a version that the feed did not carry."""
        self._versions[VersionKey(version.function, version.version)] = version

    def set_leaving(self, instance_id: str, leaving: bool) -> None:
        """Take an instance out of routing before its node says so, or back in."""
        if leaving:
            self._leaving.add(instance_id)
        else:
            self._leaving.discard(instance_id)

    def start_failed(self, key: VersionKey, instance_id: str, node: str, error: str) -> None:
        """Note a failed start; one noted already (by its id) is left as it is."""
        failures = self._failures.setdefault(key, deque(maxlen=_KEPT_FAILURES))
        if any(failure.instance_id == instance_id for failure in failures):
            return
        self.failure_serial += 1
        failures.append(
            StartFailure(serial=self.failure_serial, instance_id=instance_id, node=node, error=error)
        )

    # --- what it knows

    def version(self, key: VersionKey) -> FunctionVersion | None:
        return self._versions.get(key)

    def current(self, function: str) -> FunctionVersion | None:
        head = self.functions.get(function)
        return None if head is None else self._versions.get(VersionKey(function, head.current))

    def versions(self) -> list[FunctionVersion]:
        return list(self._versions.values())

    def node(self, id_: str) -> NodeEntry | None:
        return self._nodes.get(id_)

    def nodes(self) -> list[NodeEntry]:
        return list(self._nodes.values())

    def usable_nodes(self) -> Iterator[NodeRecord]:
        return (entry.record for entry in self._nodes.values() if entry.usable)

    def instance(self, instance_id: str) -> InstanceRecord | None:
        return self._instances.get(instance_id)

    def instances(self, key: VersionKey | None = None) -> list[InstanceRecord]:
        return list((self._instances if key is None else self._by_key.get(key, {})).values())

    def instance_keys(self) -> list[VersionKey]:
        return [key for key, held in self._by_key.items() if held]

    def ready(self, key: VersionKey) -> list[InstanceRecord]:
        """The instances that calls may be sent to."""
        return [
            instance
            for instance in self._by_key.get(key, {}).values()
            if instance.state is InstanceState.READY
            and instance.instance_id not in self._leaving
            and self._usable(instance.node)
        ]

    def servers(self, key: VersionKey) -> "list[Server]":
        """All that calls may be sent to: ready instances, and pipelines of those that are loading. One that
        is helped takes calls by its pair only, and one that loaded alone takes them itself."""
        pipelines = self.live.servers(key.function, key.version, self._usable)
        sources = [server.pipeline.source for server in pipelines]
        helped = {source.instance_id for source in sources if source is not None}
        ready = [one for one in self.ready(key) if one.instance_id not in helped]
        whole = {one.instance_id for one in ready}
        return [*ready, *(one for one in pipelines if not (one.is_lone and one.head.instance_id in whole))]

    def coming(self, key: VersionKey) -> list[InstanceRecord]:
        """The instances that are starting on usable nodes."""
        return [
            instance
            for instance in self._by_key.get(key, {}).values()
            if instance.state in COMING
            and instance.instance_id not in self._leaving
            and self._usable(instance.node)
        ]

    def holders(self, image: str, tier: Tier) -> list[NodeRecord]:
        """Usable nodes whose `tier` holds the complete image."""
        return [
            record
            for record in self.usable_nodes()
            if any(holding.image == image and tier in holding.tiers for holding in record.holdings)
        ]

    def demands(self, *, besides: str = "") -> Iterator[Demand]:
        """What the gateways want, without the one named."""
        for gateway, remote in self._demands.items():
            if gateway != besides:
                yield from remote.demands

    def failures(self, key: VersionKey, since_serial: int = 0) -> list[StartFailure]:
        return [f for f in self._failures.get(key, ()) if f.serial > since_serial]

    def view(self) -> Snapshot:
        return Snapshot(
            cursor=self.cursor,
            functions=tuple(self.functions.values()),
            versions=tuple(self._versions.values()),
            nodes=tuple(NodeUp(record=e.record, ttl_s=e.ttl_s) for e in self._nodes.values()),
            instances=tuple(self._instances.values()),
            demands=tuple(
                DemandChanged(gateway=gateway, demands=remote.demands, ttl_s=remote.ttl_s)
                for gateway, remote in self._demands.items()
            ),
            casts=tuple(self.casts),
            live=tuple(LiveChanged(record=record, ttl_s=0.0) for record in self.live),
        )

    # --- inside

    def _usable(self, node: str) -> bool:
        entry = self._nodes.get(node)
        return entry is not None and entry.usable

    def _put_node(self, up: NodeUp, now: float) -> None:
        known = self._nodes.get(up.record.id)
        if known is not None and up.record.epoch < known.record.epoch:
            return
        if known is not None and up.record.epoch > known.record.epoch:
            self._remove_instances(up.record.id)
            self.cast_ends.lost(up.record.id, now)
        if known is None and self._lapsed.pop(up.record.id, None) == up.record.epoch:
            self.incomplete = True
        self._nodes[up.record.id] = NodeEntry(
            record=up.record,
            ttl_s=up.ttl_s,
            deadline_s=now + up.ttl_s,
            channel_epoch=known.channel_epoch if known else 0,
        )

    def _set_channel(self, node: str, epoch: int) -> None:
        entry = self._nodes.get(node)
        if entry is not None:
            self._nodes[node] = replace(entry, channel_epoch=epoch)

    def _remove_node(self, id_: str, now: float) -> None:
        del self._nodes[id_]
        self.cast_ends.lost(id_, now)
        self._remove_instances(id_)

    def _remove_instances(self, node: str) -> None:
        for instance in [i for i in self._instances.values() if i.node == node]:
            self._drop_instance(instance)

    def _change_instance(self, record: InstanceRecord) -> None:
        key = VersionKey(record.function, record.version)
        known = self._instances.get(record.instance_id)
        # One without room may yet be made elsewhere: the controller tells if it gives up.
        failed = record.state is InstanceState.FAILED and not record.no_room
        if failed and (known is None or known.state in COMING):
            self.start_failed(key, record.instance_id, record.node, record.error or "no reason given")
        if record.state is InstanceState.READY:
            self._failures.pop(key, None)
            if known is None or known.state in COMING:
                for callback in self._on_start:
                    callback(record)
        if record.state in FINAL:
            if known is not None:
                self._drop_instance(known)
        else:
            self._put_instance(record)

    def _put_instance(self, record: InstanceRecord) -> None:
        self._instances[record.instance_id] = record
        key = VersionKey(record.function, record.version)
        self._by_key.setdefault(key, {})[record.instance_id] = record

    def _drop_instance(self, record: InstanceRecord) -> None:
        key = VersionKey(record.function, record.version)
        del self._instances[record.instance_id]
        del self._by_key[key][record.instance_id]
        if not self._by_key[key]:
            del self._by_key[key]
        self._leaving.discard(record.instance_id)

    def _put_demand(self, change: DemandChanged, now: float) -> None:
        if change.demands:
            self._demands[change.gateway] = RemoteDemand(
                demands=change.demands, ttl_s=change.ttl_s, deadline_s=now + change.ttl_s
            )
        else:
            self._demands.pop(change.gateway, None)
