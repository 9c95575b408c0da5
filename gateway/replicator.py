"""Which images get a host copy, and which surplus copies go: a pure step of the control loop.

Every deployed current version keeps at least one copy in the cluster's host memory (keepers.py says
which one); a node that dies with the last one is replaced by whoever can still give (or read) the image.
"""

from dataclasses import replace

from gateway.actions import DropFrom, WarmOn
from gateway.directory import Directory
from gateway.keepers import Keepers, current_versions, host_copies
from gateway.placement import choose_loader, choose_sources, choose_warm
from gateway.plan import Plan
from gateway.planner import Planner
from gateway.retries import Retries
from registry.instance import InstanceState
from registry.node import Holding, NodeRecord, Tier

_SETTLE_S = 5.0  # a node that has just loaded an image may not have told its tiers yet
_UNKNOWN_IDLE_S = 300.0  # an image without a version may be a deploy that is still under way


class Replicator:
    def __init__(self, planner: Planner, *, retry_s: float = 1.0, max_retry_s: float = 60.0) -> None:
        self._planner = planner
        self._retries = Retries(first_s=retry_s, most_s=max_retry_s)
        self._keepers = Keepers(planner, self._retries)

    def __repr__(self) -> str:
        return f"<Replicator {self._keepers!r} {self._retries!r}>"

    def plan(self, directory: Directory, plan: Plan, now: float, wall: float) -> None:
        """Add the copies to make, to keep and to drop to `plan`, and put off starts that must wait for it."""
        self._retries.forget_old(now)
        self._keepers.relieve(directory, plan, now)
        self._keepers.designate(directory, plan, now, wall)
        self._replicate(directory, plan, now, wall)
        self._drop_surplus(directory, plan, now, wall)

    def failed(self, image: str, node: str, now: float) -> None:
        """Warming or dropping failed there; try again later, and others first."""
        self._retries.failed(image, node, now)

    def _replicate(self, directory: Directory, plan: Plan, now: float, wall: float) -> None:
        nodes = {node.id: node for node in directory.usable_nodes()}
        for image, version in current_versions(directory).items():
            if directory.holders(image, Tier.HOST) or self._planner.loading(directory, image):
                continue
            settled_at = self._settled_at(directory, image, wall)
            if settled_at is not None:
                plan.again_at(now + settled_at - wall)
                continue
            able = [node for node in nodes.values() if not self._retries.wait(image, node.id, plan, now)]
            if not directory.holders(image, Tier.GPU):  # someone must read it: from a disk or the store
                able = [node for node in able if choose_loader(image, [node]) is not None]
            for node in choose_warm(image, version.image_bytes, 1, able):
                holders = choose_sources(image, [node], list(nodes.values()), []).holders.get(node.id, ())
                self._planner.warming[image, node.id] = None
                plan.actions.append(
                    WarmOn(version=version, node=node.id, holders=holders, keep=True, yielding=True)
                )
                nodes[node.id] = _promised(node, image, version.image_bytes)

    def _settled_at(self, directory: Directory, image: str, wall: float) -> float | None:
        """When the nodes with a fresh instance of the image must have told that they hold it."""
        found = None
        for version in directory.versions():
            if version.image != image:
                continue
            for instance in directory.instances():
                same = (instance.function, instance.version) == (version.function, version.version)
                # Clocks differ, and steps of them must not hold a copy up.
                fresh = instance.state is InstanceState.READY and abs(wall - instance.since) < _SETTLE_S
                if same and fresh:
                    found = max(found or 0.0, min(wall, instance.since) + _SETTLE_S)
        return found

    def _drop_surplus(self, directory: Directory, plan: Plan, now: float, wall: float) -> None:
        current = current_versions(directory)
        keep_s: dict[str, float] = {}
        used: set[tuple[str, str]] = set()  # (image, host)
        for version in directory.versions():
            head = directory.functions.get(version.function)
            if head is None or version.image is None:
                continue
            keep_s[version.image] = max(keep_s.get(version.image, 0.0), head.scaling.host_keep_alive_s)
            for instance in directory.instances():
                entry = directory.node(instance.node)
                if entry is not None and (instance.function, instance.version) == (
                    version.function,
                    version.version,
                ):
                    used.add((version.image, entry.record.host))
        used |= self._arriving(directory)

        for image, hosts in host_copies(directory.usable_nodes()).items():
            left = len(hosts)
            for copy in sorted(hosts.values(), key=lambda copy: (copy.last_used_at, copy.node)):
                due = copy.last_used_at + keep_s.get(image, _UNKNOWN_IDLE_S)
                if (image, copy.host) in used or (image in current and (left <= 1 or copy.kept)):
                    continue
                if self._retries.wait(image, copy.node, plan, now):
                    continue
                if due > wall:
                    plan.again_at(now + due - wall)
                else:
                    left -= 1
                    # Until the node tells that it is gone, this keeps us from asking again.
                    self.failed(image, copy.node, now)
                    plan.actions.append(DropFrom(image=image, node=copy.node, tier=Tier.HOST))

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


def _promised(node: NodeRecord, image: str, nbytes: int) -> NodeRecord:
    """The node as it will be once it keeps the image, so that several images spread."""
    coming = Holding(image=image, tiers=(Tier.HOST,), bytes=nbytes, last_used_at=0.0, kept=True)
    return replace(
        node, holdings=(*node.holdings, coming), host_free_bytes=max(0, node.host_free_bytes - nbytes)
    )
