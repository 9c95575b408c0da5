"""Which images get a host copy, and which surplus copies go: a pure step of the control loop.

Every deployed current version keeps at least one copy in the cluster's host memory; a node that dies
with the last one is replaced by whoever can still give (or read) the image.
"""

from dataclasses import dataclass, replace

from gateway.actions import DropFrom, WarmOn
from gateway.directory import Directory
from gateway.placement import choose_loader, choose_sources, choose_warm
from gateway.plan import Plan
from gateway.planner import Planner
from registry.instance import InstanceState
from registry.node import Tier

_SETTLE_S = 5.0  # a node that has just loaded an image may not have told its tiers yet
_UNKNOWN_IDLE_S = 300.0  # an image without a version may be a deploy that is still under way


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """A node on which an image could not be warmed (or dropped): not before `until`."""

    until: float
    count: int


class Replicator:
    def __init__(self, planner: Planner, *, retry_s: float = 1.0, max_retry_s: float = 60.0) -> None:
        self._planner = planner
        self._retry_s = retry_s
        self._max_retry_s = max_retry_s
        self._retries: dict[tuple[str, str], Retry] = {}

    def plan(self, directory: Directory, plan: Plan, now: float, wall: float) -> None:
        """Add the copies to make and to drop to `plan`."""
        self._retries = {pair: r for pair, r in self._retries.items() if r.until + self._max_retry_s > now}
        self._replicate(directory, plan, now, wall)
        self._drop_surplus(directory, plan, now, wall)

    def failed(self, image: str, node: str, now: float) -> None:
        """Warming or dropping failed there; try again later, and others first."""
        retry = self._retries.get((image, node), Retry(until=0.0, count=0))
        wait_s = min(self._max_retry_s, self._retry_s * 2**retry.count)
        self._retries[image, node] = replace(retry, until=now + wait_s, count=retry.count + 1)

    def _replicate(self, directory: Directory, plan: Plan, now: float, wall: float) -> None:
        nodes = list(directory.usable_nodes())
        for head in directory.functions.values():
            version = directory.current(head.name)
            if version is None or version.image is None or directory.holders(version.image, Tier.HOST):
                continue
            image = version.image
            if self._planner.loading(directory, image):
                continue
            settled_at = self._settled_at(directory, image, wall)
            if settled_at is not None:
                plan.again_at(now + settled_at - wall)
                continue
            able = []
            for node in nodes:
                retry = self._retries.get((image, node.id))
                if retry is not None and now < retry.until:
                    plan.again_at(retry.until)
                else:
                    able.append(node)
            if not directory.holders(image, Tier.GPU):  # someone must read it: from a disk or the store
                able = [node for node in able if choose_loader(image, [node]) is not None]
            for node in choose_warm(image, version.image_bytes, 1, able):
                holders = choose_sources(image, [node], nodes, []).holders.get(node.id, ())
                self._planner.warming[image, node.id] = None
                plan.actions.append(WarmOn(version=version, node=node.id, holders=holders))

    def _settled_at(self, directory: Directory, image: str, wall: float) -> float | None:
        """When the nodes with a fresh instance of the image must have told that they hold it."""
        found = None
        for version in directory.versions():
            if version.image != image:
                continue
            for instance in directory.instances():
                same = (instance.function, instance.version) == (version.function, version.version)
                fresh = instance.state is InstanceState.READY and wall - instance.since < _SETTLE_S
                if same and fresh:
                    found = max(found or 0.0, instance.since + _SETTLE_S)
        return found

    def _drop_surplus(self, directory: Directory, plan: Plan, now: float, wall: float) -> None:
        current: set[str | None] = set()
        keep_s: dict[str, float] = {}
        used: set[tuple[str, str]] = set()  # (image, host)
        for version in directory.versions():
            head = directory.functions.get(version.function)
            if head is None or version.image is None:
                continue
            if head.current == version.version:
                current.add(version.image)
            keep_s[version.image] = max(keep_s.get(version.image, 0.0), head.scaling.host_keep_alive_s)
            for instance in directory.instances():
                entry = directory.node(instance.node)
                if entry is not None and (instance.function, instance.version) == (
                    version.function,
                    version.version,
                ):
                    used.add((version.image, entry.record.host))
        used |= self._arriving(directory)

        copies: dict[str, dict[str, tuple[float, str]]] = {}  # image -> host -> (last used, node)
        for node in directory.usable_nodes():
            for holding in node.holdings:
                if Tier.HOST in holding.tiers:
                    hosts = copies.setdefault(holding.image, {})
                    hosts[node.host] = max(hosts.get(node.host, (0.0, "")), (holding.last_used_at, node.id))
        for image, hosts in copies.items():
            left = len(hosts)
            for host, (last_used_at, node_id) in sorted(hosts.items(), key=lambda row: row[1]):
                retry = self._retries.get((image, node_id))
                due = last_used_at + keep_s.get(image, _UNKNOWN_IDLE_S)
                if (image, host) in used or (image in current and left <= 1):
                    continue
                if retry is not None and now < retry.until:
                    plan.again_at(retry.until)
                elif due > wall:
                    plan.again_at(now + due - wall)
                else:
                    left -= 1
                    # Until the node tells that it is gone, this keeps us from asking again.
                    self.failed(image, node_id, now)
                    plan.actions.append(DropFrom(image=image, node=node_id, tier=Tier.HOST))

    def _arriving(self, directory: Directory) -> set[tuple[str, str]]:
        pairs = set()
        for image, node in self._planner.warming:
            entry = directory.node(node)
            if entry is not None:
                pairs.add((image, entry.record.host))
        for pending in self._planner.pending.values():
            entry = directory.node(pending.node)
            if entry is not None and pending.image is not None:
                pairs.add((pending.image, entry.record.host))
        return pairs
