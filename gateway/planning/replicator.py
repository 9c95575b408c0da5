"""Host copies of deployed images: which to make, pin, unpin and drop, as a pure step of the control loop.

Every image of a current version has one pinned copy in the cluster's host memory, unless all its functions
have `host_copies: 0`. The host evicts it after all others; `image_owners` chooses the host. Starts that would
evict pinned copies wait until other hosts own these. A start makes a copy only where one is to be kept, or
shared by several starts of its host; else the image arrives in the accelerator's memory.
"""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from gateway.cluster.backoff import BackoffTable
from gateway.cluster.node_space import holds, host_room_bytes
from gateway.cluster.state_cache import ClusterStateCache, VersionKey
from gateway.planning.actions import DropAction, PrefetchAction, StartAction, UnpinAction
from gateway.planning.image_owners import (
    HostCopies,
    HostCopy,
    OwnedImage,
    OwnerHost,
    assign_owners,
    current_versions,
    host_copies,
    is_outdated,
    kept_images,
    nodes_by_host,
    score,
)
from gateway.planning.image_sources import choose_loader, choose_sources
from gateway.planning.plan import Plan
from gateway.planning.planner import ScalingPlanner
from gateway.planning.serving_traffic import serving_traffic
from registry.records.engine import EngineKind
from registry.records.function import FunctionVersion
from registry.records.instance import InstanceState
from registry.records.node import NodeRecord, Tier

_SETTLE_S = 5.0  # a node that has just loaded an image may not have reported its tiers yet
_UNKNOWN_IDLE_S = 300.0  # an image without a version may be that of a deploy in progress
_DEPLOYING_S = 30.0  # so may a pinned copy without a current version
_RELIEF_S = 10.0  # how long starts on a host wait for new owners of its pinned copies

_Place = tuple[str, str]  # an image, and a host


@dataclass(frozen=True, slots=True, kw_only=True)
class _CopyStep:
    """The inputs of one step, and its plan; `on_gpus` are images that an accelerator holds.

    Of the images of `current` versions, `kept` ones are those of which a pinned copy is kept.
    `now` is monotonic, `wall` Unix time.
    """

    cache: ClusterStateCache
    plan: Plan
    now: float
    wall: float
    hosts: Mapping[str, Sequence[NodeRecord]]
    copies: HostCopies
    on_gpus: frozenset[str]
    current: Mapping[str, FunctionVersion]
    kept: Set[str]


class Replicator:
    """The replicator of one controller; failed copies are in the planner's backoff table, by image.

    A host keeps at most `served_copies_bytes` in copies of images that its accelerators serve.
    """

    def __init__(self, planner: ScalingPlanner, served_copies_bytes: int = 0) -> None:
        self._planner = planner
        self._served_copies_bytes = served_copies_bytes
        self._waiting: dict[str, float] = {}  # host -> since when starts there wait for other owners

    def __repr__(self) -> str:
        return f"<Replicator waiting={sorted(self._waiting)}>"

    @property
    def _backoff(self) -> BackoffTable:
        return self._planner.backoff

    def plan(self, state_cache: ClusterStateCache, plan: Plan, now: float, wall: float) -> None:
        """Add the copies to make, pin, unpin and drop to `plan`; postpone starts that must wait for them."""
        nodes = list(state_cache.usable_nodes())
        step = _CopyStep(
            cache=state_cache,
            plan=plan,
            now=now,
            wall=wall,
            hosts=nodes_by_host(nodes),
            copies=host_copies(nodes),
            on_gpus=frozenset(h.image for node in nodes for h in node.holdings if Tier.GPU in h.tiers),
            current=current_versions(state_cache),
            kept=kept_images(state_cache),
        )
        self._backoff.expire(now)
        self._choose_host_copies(step)
        owners = self._assign_owners(step)
        for image in step.current:
            if image in owners:
                self._keep(image, owners[image], step)
        self._unpin_others(step)
        self._drop_surplus(step)
        self._drop_deleted_from_disks(step)

    def failed(self, image: str, node: str, now: float) -> None:
        """Record a failed prefetch or drop: other nodes are tried first."""
        self._backoff.failed(image, node, now)

    # --- starts

    def _choose_host_copies(self, step: _CopyStep) -> None:
        """Choose the starts that bring the image into host memory, from where their node copies it."""
        starts = _starts_without_copy(step)
        on_host = Counter((start.version.image, node.host) for start, node in starts)
        unpinned: Counter[str] = Counter()
        for copies in step.copies.values():
            unpinned.update({host: copy.nbytes for host, copy in copies.items() if not copy.pinned})
        first = self._first_copies(starts, step)
        for start, node in starts:
            nbytes, image = start.version.image_bytes, start.version.image
            fits = unpinned[node.host] + nbytes <= self._served_copies_bytes
            shared = on_host[image, node.host] > 1
            wanted = start.instance_id in first or shared or fits
            if start.version.engine is not EngineKind.NATIVE or (wanted and nbytes <= node.host_bytes):
                unpinned[node.host] += nbytes if fits else 0
                place = step.plan.actions.index(start)
                step.plan.actions[place] = replace(start, host_copy=True)

    def _first_copies(self, starts: Sequence[tuple[StartAction, NodeRecord]], step: _CopyStep) -> set[str]:
        """Return the starts that make the only copy of an image of which one is kept."""
        found: dict[str, StartAction] = {}
        starting = {node.id for _, node in starts}
        for start, _ in starts:
            image = start.version.image
            if image is None or image not in step.kept or step.copies.get(image):
                continue
            loading = {node.id for node in self._planner.loading(step.cache, image)}
            if not loading - starting and (image not in found or not start.holders):
                found[image] = start
        return {start.instance_id for start in found.values()}

    # --- owners

    def _assign_owners(self, step: _CopyStep) -> dict[str, str]:
        """Return the owner of each image; postpone starts on hosts that must give up pinned copies first."""
        images = [
            self._owned_image(image, version, step)
            for image, version in step.current.items()
            if image in step.kept
        ]
        limits = self._relief_limits(step)
        while True:
            owners = assign_owners(
                images, self._owner_hosts(limits, step), lambda image: self._fetchers(image, step)
            )
            excess = [host for host in limits if self._pinned_bytes(host, step, owners) > limits[host]]
            if not excess:
                break
            limits = {host: limit for host, limit in limits.items() if host not in excess}
        self._waiting = {host: self._waiting.get(host, step.now) for host in limits}
        for start, node in _starts_without_copy(step):
            if start.host_copy and node.host in limits:
                step.plan.actions.remove(start)
                self._planner.cancel_start(start.instance_id)
                step.plan.replan_at(self._waiting[node.host] + _RELIEF_S)
        return owners

    def _owned_image(self, image: str, version: FunctionVersion, step: _CopyStep) -> OwnedImage:
        copies = step.copies.get(image, {})
        pinned = frozenset(host for host, copy in copies.items() if copy.pinned)
        free = frozenset(host for host, copy in copies.items() if self._may_try(image, copy.node, step))
        return OwnedImage(digest=image, nbytes=version.image_bytes, pinned=pinned, holders=free - pinned)

    def _fetchers(self, image: OwnedImage, step: _CopyStep) -> list[str]:
        """Return the hosts that could fetch a copy; none where an existing one is to be pinned."""
        copies = step.copies.get(image.digest, {})
        if copies and not image.pinned:
            return []
        version = step.current[image.digest]
        return [
            host
            for host in step.hosts
            if host not in copies and self._fetch_node(image.digest, version, host, step) is not None
        ]

    def _owner_hosts(self, limits: Mapping[str, int], step: _CopyStep) -> list[OwnerHost]:
        return [
            OwnerHost(
                id=host,
                weight=nodes[0].host_bytes,
                room_bytes=host_room_bytes(nodes[0]),
                max_bytes=limits.get(host, nodes[0].host_bytes),
            )
            for host, nodes in step.hosts.items()
        ]

    def _relief_limits(self, step: _CopyStep) -> dict[str, int]:
        """Return by host how many bytes it may own so that this step's starts evict no pinned copy."""
        needed: dict[str, dict[str, int]] = {}
        for start, node in _starts_without_copy(step):
            image = start.version.image
            if start.host_copy and image is not None and node.host in step.hosts:
                needed.setdefault(node.host, {})[image] = start.version.image_bytes
        limits = {}
        for host, images in needed.items():
            node = step.hosts[host][0]
            lack = sum(images.values()) - host_room_bytes(node)
            expired = step.now - self._waiting.get(host, step.now) >= _RELIEF_S
            limit = self._pinned_bytes(host, step) - lack
            if lack > 0 and limit >= 0 and not expired:
                limits[host] = limit
        return limits

    def _pinned_bytes(self, host: str, step: _CopyStep, owners: Mapping[str, str] | None = None) -> int:
        """Return the bytes of deployed images that the host has pinned, and still owns by `owners`."""
        return sum(
            step.current[image].image_bytes
            for image, copies in step.copies.items()
            if image in step.kept and host in copies and copies[host].pinned
            if owners is None or owners.get(image) == host
        )

    def _fetch_node(
        self, image: str, version: FunctionVersion, host: str, step: _CopyStep
    ) -> NodeRecord | None:
        """Return the node of the host that is to fetch the image, None if none can now."""
        able = [
            node
            for node in step.hosts[host]
            if node.host_bytes >= version.image_bytes and self._may_try(image, node.id, step)
        ]
        if image not in step.copies and image not in step.on_gpus:
            able = [node for node in able if node.reads_store or choose_loader(image, [node]) is not None]
        return max(able, key=lambda node: (node.reads_store, score(image, node.id, 1)), default=None)

    def _may_try(self, image: str, node: str, step: _CopyStep) -> bool:
        retry_at = self._backoff.retry_at(image, node, step.now)
        step.plan.replan_at(retry_at)
        return retry_at is None

    # --- copies

    def _keep(self, image: str, owner: str, step: _CopyStep) -> None:
        """Bring the pinned copy of the image to its owner, and unpin all others once it is there."""
        copies = step.copies.get(image, {})
        own = copies.get(owner)
        if own is not None and own.pinned:
            for host, copy in copies.items():
                if copy.pinned and host != owner:
                    self._unpin(copy, step)
        elif any(image == arriving for arriving, _ in self._planner.prefetching):
            return
        elif own is not None:
            self._prefetch(image, own.node, step)
        elif copies:
            relieved = any(copies[host].pinned for host in copies.keys() & self._waiting.keys())
            # Copies that only balance hosts are made one by one, while nothing else is in progress.
            if relieved or not (self._planner.prefetching or self._planner.pending):
                self._fetch(image, owner, step)
        elif not self._planner.loading(step.cache, image):
            settled_at = self._settled_at(image, step)
            if settled_at is None:
                self._fetch(image, owner, step)
            else:
                step.plan.replan_at(step.now + settled_at - step.wall)

    def _fetch(self, image: str, host: str, step: _CopyStep) -> None:
        node = self._fetch_node(image, step.current[image], host, step)
        assert node is not None, "owners without a copy can fetch it"
        self._prefetch(image, node.id, step)

    def _prefetch(self, image: str, node: str, step: _CopyStep) -> None:
        """Make, or only pin, the copy of a node's host."""
        entry = step.cache.node(node)
        assert entry is not None, "owners are usable nodes"
        senders = serving_traffic(step.cache).senders
        sources = choose_sources(image, [entry.record], step.cache.index.sources(image), [], senders)
        self._planner.prefetching[image, node] = None
        step.plan.actions.append(
            PrefetchAction(
                version=step.current[image],
                node=node,
                holders=sources.holders.get(node, ()),
                pin=True,
                preserve_pinned=True,
            )
        )

    def _unpin(self, copy: HostCopy, step: _CopyStep) -> None:
        """Unpin the copy; an unpin without effect is repeated with backoff."""
        subject = ("unpin", copy.image)
        retry_at = self._backoff.retry_at(subject, copy.node, step.now)
        step.plan.replan_at(retry_at)
        if retry_at is None:
            self._backoff.failed(subject, copy.node, step.now)
            step.plan.actions.append(UnpinAction(image=copy.image, node=copy.node))

    def _unpin_others(self, step: _CopyStep) -> None:
        """Unpin the copies of images which are not kept, after a while where a deploy may be in progress."""
        for image, copies in step.copies.items():
            if image in step.kept:
                continue
            outdated = image in step.current or is_outdated(step.cache, image)
            for copy in copies.values():
                due = copy.last_used_at + _DEPLOYING_S
                if copy.pinned and (outdated or due <= step.wall):
                    self._unpin(copy, step)
                elif copy.pinned:
                    step.plan.replan_at(step.now + due - step.wall)

    def _settled_at(self, image: str, step: _CopyStep) -> float | None:
        """Return when nodes with a fresh instance of the image must have reported their copy."""
        found = None
        for version in step.cache.versions(image):
            for instance in step.cache.instances(VersionKey(version.function, version.version)):
                # Clocks differ, and a step of one must not delay a copy.
                is_fresh = (
                    instance.state is InstanceState.READY and abs(step.wall - instance.since) < _SETTLE_S
                )
                if is_fresh:
                    found = max(found or 0.0, min(step.wall, instance.since) + _SETTLE_S)
        return found

    # --- surplus

    def _drop_deleted_from_disks(self, step: _CopyStep) -> None:
        """Drop images that no version has any more from the disks of hosts, which their nodes share."""
        for nodes in step.hosts.values():
            node = nodes[0]
            for holding in node.holdings:
                if Tier.DISK not in holding.tiers or step.cache.versions(holding.image):
                    continue
                subject, due = ("disk", holding.image), holding.last_used_at + _DEPLOYING_S
                if due > step.wall:
                    step.plan.replan_at(step.now + due - step.wall)
                    continue
                retry_at = self._backoff.retry_at(subject, node.id, step.now)
                step.plan.replan_at(retry_at)
                if retry_at is None:
                    # Until the node reports that it is dropped, this delays a repetition.
                    self._backoff.failed(subject, node.id, step.now)
                    step.plan.actions.append(DropAction(image=holding.image, node=node.id, tier=Tier.DISK))

    def _drop_surplus(self, step: _CopyStep) -> None:
        """Drop host copies that are not pinned, and not the last one of an image that is kept.

        Those that nobody uses are dropped after a while. Those of which the accelerators of the host have a
        copy, which peers read (BlitzScale §5.3), are dropped at once, least recently used first, until the
        rest fits what a host may keep of them.
        """
        uses = self._uses(step)
        arriving = self._arriving(step)
        redundant = self._redundant(step, uses, arriving)
        for image, hosts in step.copies.items():
            left = len(hosts)
            keep_s = _keep_s(image, step)
            for copy in sorted(hosts.values(), key=lambda copy: (copy.last_used_at, copy.node)):
                place = (image, copy.host)
                if place in redundant:
                    due = step.wall
                elif place in uses or place in arriving:
                    continue
                else:
                    due = copy.last_used_at + keep_s
                if image in step.kept and (left <= 1 or copy.pinned):
                    continue
                if not self._may_try(image, copy.node, step):
                    continue
                if due > step.wall:
                    step.plan.replan_at(step.now + due - step.wall)
                else:
                    left -= 1
                    # Until the node reports that it is dropped, this delays a repetition.
                    self.failed(image, copy.node, step.now)
                    step.plan.actions.append(DropAction(image=image, node=copy.node, tier=Tier.HOST))

    def _uses(self, step: _CopyStep) -> dict[_Place, bool]:
        """Return the places that instances use, and whether all their nodes have the image in the arena.

        Another engine than the nodes' own maps the host copy.
        """
        found: dict[_Place, bool] = {}
        for version in step.cache.versions():
            if version.image is None or version.function not in step.cache.functions:
                continue
            for instance in step.cache.instances(VersionKey(version.function, version.version)):
                entry = step.cache.node(instance.node)
                if entry is None:
                    continue
                place = (version.image, entry.record.host)
                found[place] = found.get(place, True) and (
                    version.engine is EngineKind.NATIVE
                    and instance.state in (InstanceState.READY, InstanceState.DRAINING)
                    and holds(entry.record, version.image, Tier.GPU)
                )
        return found

    def _redundant(self, step: _CopyStep, uses: Mapping[_Place, bool], arriving: Set[_Place]) -> set[_Place]:
        """Return the places of copies that accelerators serve, and that exceed what their host may keep."""
        kept_bytes: dict[str, int] = {}
        found = set()
        served = [
            copy
            for image, copies in step.copies.items()
            for host, copy in copies.items()
            if uses.get((image, host)) and (image, host) not in arriving and copy.settled
            if not (copy.pinned and image in step.kept)
        ]
        for copy in sorted(served, key=lambda copy: (-copy.last_used_at, copy.image)):
            nbytes = kept_bytes.get(copy.host, 0) + copy.nbytes
            if nbytes > self._served_copies_bytes:
                found.add((copy.image, copy.host))
            else:
                kept_bytes[copy.host] = nbytes
        return found

    def _arriving(self, step: _CopyStep) -> set[_Place]:
        pairs = list(self._planner.prefetching)
        pairs += [(start.image, start.node) for start in self._planner.pending.values() if start.image]
        entries = [(image, step.cache.node(node)) for image, node in pairs]
        return {(image, entry.record.host) for image, entry in entries if entry is not None}


def _keep_s(image: str, step: _CopyStep) -> float:
    """Return for how long idle copies of an image are kept."""
    heads = (step.cache.functions.get(version.function) for version in step.cache.versions(image))
    keep_s = [head.scaling.host_keep_alive_s for head in heads if head is not None]
    return max(keep_s, default=_UNKNOWN_IDLE_S)


def _starts_without_copy(step: _CopyStep) -> list[tuple[StartAction, NodeRecord]]:
    """Return the starts of the plan that load an image of which their host has no copy, with their nodes."""
    found = []
    for action in step.plan.actions:
        if not isinstance(action, StartAction) or action.version.image is None or not action.loads_whole:
            continue
        entry = step.cache.node(action.node)
        if entry is None or holds(entry.record, action.version.image, Tier.GPU):
            continue
        if entry.record.host not in step.copies.get(action.version.image, {}):
            found.append((action, entry.record))
    return found
