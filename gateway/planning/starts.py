"""Starts of one planning step: which nodes start a version, from which sources, and starts that cannot be.

Pure but for what it keeps: starts and prefetches that were requested and that the state cache does not show.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import islice

from gateway.cluster.backoff import BackoffTable
from gateway.cluster.node_space import arena_room, tier_of
from gateway.cluster.state_cache import ClusterStateCache, VersionKey
from gateway.planning.actions import FailStartAction, FetchVersionAction, PrefetchAction, StartAction
from gateway.planning.arena_space import (
    ArenaSpace,
    FreeNodes,
    SpaceRequest,
    choose_victims,
    is_leaving,
)
from gateway.planning.group_starts import GroupPlanner
from gateway.planning.image_sources import choose_part_sources, choose_sources
from gateway.planning.placement import (
    choose_starts,
    image_need,
    too_small,
    unschedulable_reason,
)
from gateway.planning.plan import NodeAffinity, PendingStart, Plan, PlannerSettings
from gateway.planning.policy import FunctionLoad
from gateway.planning.serving_traffic import serving_traffic
from registry.messages.images import ImageHolder
from registry.records.function import FunctionVersion
from registry.records.instance import InstanceGroup, InstanceRecord
from registry.records.node import NodeRecord, Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingStep:
    """The inputs of one planning step, and its plan."""

    cache: ClusterStateCache
    loads: Mapping[VersionKey, FunctionLoad]
    in_flight: Mapping[str, int]
    plan: Plan
    now: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRequest:
    """`count` missing instances of a version, on the nodes of `affinity` if set.

    `has_floor`: they were requested, not only needed by calls.
    """

    key: VersionKey
    count: int
    has_floor: bool = False
    affinity: NodeAffinity | None = None


class StartResult(Enum):
    """What became of a request for starts."""

    PLANNED = auto()  # as far as nodes allow
    UNSCHEDULABLE = auto()  # no node can ever run the version
    STUCK = auto()  # no node can start the version now
    FAILED = auto()  # no node could start it for so long that its calls fail


class StartPlanner:
    """The planner of starts of one controller, with those in progress."""

    def __init__(
        self, new_id: Callable[[VersionKey], str], settings: PlannerSettings, backoff: BackoffTable
    ) -> None:
        self._new_id = new_id
        self._settings = settings
        self._backoff = backoff
        self._fetching: set[VersionKey] = set()
        self._space: ArenaSpace | None = None
        # Versions whose calls wait without any instance, since when: up to the last step, and in this one.
        self._without: dict[VersionKey, float] = {}
        self._still_without: dict[VersionKey, float] = {}
        self.groups = GroupPlanner(new_id)
        self.unplaced: dict[VersionKey, int] = {}  # instances that this step found no place for
        self._loaders: dict[VersionKey, str] = {}  # the nodes from which other starts get the image
        self.pending: dict[str, PendingStart] = {}
        self.stopping: dict[str, str] = {}  # instance -> node
        self.prefetching: dict[tuple[str, str], None] = {}  # (image, node), oldest first

    def __repr__(self) -> str:
        return f"<StartPlanner pending={len(self.pending)} prefetching={len(self.prefetching)}>"

    def begin(self) -> None:
        """Begin a planning step."""
        self._space, self.unplaced = None, {}
        self._without, self._still_without = self._still_without, {}

    def plan(self, request: StartRequest, step: ScalingStep) -> tuple[StartResult, Sequence[InstanceRecord]]:
        """Add starts to the plan, as far as nodes allow; return also instances to stop for the rest."""
        key, cache = request.key, step.cache
        version, load = cache.version(key), step.loads[key]
        if version is None:
            self._fetch(key, step.plan)
            return StartResult.PLANNED, ()
        kinds = cache.index.of_each_kind()
        fits_none = self.groups.needed(version, kinds, self._backoff.min_bytes(key))
        is_group = fits_none and len(cache.nodes()) > 1
        if fits_none:
            self._note_unplaced(request, request.count)  # a group of more nodes might hold it
        if unschedulable_reason(version, _known_nodes(cache) if is_group else kinds):
            return StartResult.UNSCHEDULABLE, ()
        wanted = self._space_request(request, version, step)
        space = self._step_space(cache)
        if is_group:
            return self._plan_groups(request, wanted, space, step)
        chosen = choose_starts(wanted.count, space.candidates(wanted))
        targets = [cache.index.usable[site.id] for site in chosen]
        error = self._add_starts(version, targets, space, step)
        if error:
            return self._defer(request, version, error, step, step.now + self._settings.no_source_s), ()
        hopeless = not load.held or all(too_small(node, version, wanted.min_bytes) for node in kinds)
        if wanted.min_bytes and not targets and hopeless:
            return self._defer(request, version, self._backoff.space_reason(key), step, step.now), ()
        self._note_unplaced(request, request.count - len(targets) - self._retrying(key, cache, step.now))
        if len(targets) == request.count or not load.held or not version.image:
            return StartResult.PLANNED, ()
        freed = choose_victims(
            wanted,
            space,
            step.loads,
            in_flight=step.in_flight,
            stopping=self.stopping,
            first=not (load.live or targets) and self._is_patience_over(key, load, step),
        )
        if freed is None:
            return StartResult.PLANNED, ()
        self._note_unplaced(request, self.unplaced.get(key, 0) - 1)
        # Of this step no other start takes the space.
        space.reserve(version, freed.node, wanted.min_bytes)
        return StartResult.PLANNED, freed.victims

    def _plan_groups(
        self, request: StartRequest, wanted: SpaceRequest, space: ArenaSpace, step: ScalingStep
    ) -> tuple[StartResult, Sequence[InstanceRecord]]:
        """Add the starts of groups to the plan; return also instances to stop for the first one."""
        version, used = wanted.version, set[str]()
        if not self.groups.is_known(version, step.plan):
            return StartResult.PLANNED, ()
        formed = 0
        while formed < request.count and (group := self.groups.choose(wanted, space, used)) is not None:
            error = self._add_members(version, group, space, step)
            if error:
                fail_at = step.now + self._settings.no_source_s
                return self._defer(request, version, error, step, fail_at), ()
            used |= {member.node for member in group.members}
            formed += 1
        self._note_unplaced(request, request.count - formed)
        if formed:
            return StartResult.PLANNED, ()
        if reason := self.groups.why_never(wanted, _known_nodes(step.cache)):
            reason = self._backoff.space_reason(request.key) or reason
            fail_at = step.now + self._settings.no_source_s  # a lost node may be back by then
            return self._defer(request, version, reason, step, fail_at), ()
        if not step.loads[request.key].held:
            return StartResult.PLANNED, ()
        parts, victims = self.groups.choose_victims(
            wanted, space, step.loads, in_flight=step.in_flight, stopping=self.stopping
        )
        if parts:
            self._note_unplaced(request, request.count - 1)
        for part in parts:  # of this step no other start takes the space
            node = step.cache.index.usable[part.node]
            space.reserve(version, node, wanted.min_bytes, part.image_bytes)
        return StartResult.PLANNED, victims

    def loading(self, state_cache: ClusterStateCache, image: str) -> list[NodeRecord]:
        """Return the usable nodes on which the image is arriving, oldest first."""
        return loading_nodes(image, state_cache, self.prefetching, self.pending.values())

    def loader(self, key: VersionKey) -> str | None:
        """Return the node that last read the version's image from disk or store, for the other starts."""
        return self._loaders.get(key)

    def forget(self, key: VersionKey) -> None:
        """Forget a version that is gone."""
        self._loaders.pop(key, None)

    def on_no_space(
        self, action: StartAction, state_cache: ClusterStateCache, reason: str, now: float
    ) -> None:
        """Record that the arena was too small for the start: the next one needs more free space."""
        self.pending.pop(action.instance_id, None)
        entry = state_cache.node(action.node)
        if entry is None:
            return
        used = state_cache.index.used_images(action.node)
        room = min(action.room_bytes, arena_room(entry.record, action.version.image, used))
        lacked = max(0, room - image_need(action.version, entry.record))
        if action.group is not None:  # as much as all layers would have lacked
            member, last = action.group.member(action.instance_id), action.group.members[-1].last
            lacked = max(0, room - member.image_bytes) * last // (member.last - member.first)
        self._backoff.no_space(action.key, action.node, lacked, reason, now)

    def on_fetched(self, key: VersionKey) -> None:
        """Record the end of a read of a version's record."""
        self._fetching.discard(key)

    # --- inside

    def _note_unplaced(self, request: StartRequest, count: int) -> None:
        """Record how many of the instances found no place; more nodes are no place where some are named."""
        self.unplaced.pop(request.key, None)
        if count > 0 and request.affinity is None:
            self.unplaced[request.key] = count

    def _retrying(self, key: VersionKey, cache: ClusterStateCache, now: float) -> int:
        """Return on how many nodes a start of the version has failed and will be tried again."""
        return sum(node in cache.index.usable for node in self._backoff.waits(key, now))

    def _is_patience_over(self, key: VersionKey, load: FunctionLoad, step: ScalingStep) -> bool:
        """Return whether a version's calls have waited long for a node, and for as long as a start takes.

        A node that others give up by themselves costs nothing; one that is taken costs them a start.
        """
        since = self._still_without[key] = self._without.get(key, step.now)
        until = since + max(self._settings.share_after_s, load.starts.next_s)
        step.plan.replan_at(until if step.now < until else None)
        return step.now >= until

    def _fetch(self, key: VersionKey, plan: Plan) -> None:
        if key not in self._fetching:
            self._fetching.add(key)
            plan.actions.append(FetchVersionAction(key=key))

    def _step_space(self, cache: ClusterStateCache) -> ArenaSpace:
        if self._space is None:
            self._space = ArenaSpace(cache, self.pending.values(), self._backoff)
        return self._space

    def _space_request(
        self, request: StartRequest, version: FunctionVersion, step: ScalingStep
    ) -> SpaceRequest:
        """Return the request with the nodes that may start: uncordoned, without an instance or a backoff.

        An instance that is leaving does not count: it may take as long as its calls, and a new one shares its
        image.
        """
        key, cache = request.key, step.cache
        taken = {i.node for i in cache.instances(key) if not is_leaving(i, self.stopping)}
        taken |= {start.node for start in self.pending.values() if start.key == key}
        taken |= {node.id for node in cache.index.usable.values() if node.cordoned}
        for node, retry_at in self._backoff.waits(key, step.now).items():
            if node not in taken and node in cache.index.usable:
                step.plan.replan_at(retry_at)
                taken.add(node)
        loading = self.loading(cache, version.image) if version.image else []
        only = None if request.affinity is None else request.affinity.on
        return SpaceRequest(
            version=version,
            count=request.count,
            free=FreeNodes(excluded=taken, only=only),
            min_bytes=self._backoff.min_bytes(key),
            loading_hosts={node.host for node in loading},
        )

    def _add_starts(
        self, version: FunctionVersion, targets: list[NodeRecord], space: ArenaSpace, step: ScalingStep
    ) -> str:
        """Add the starts on `targets` to the plan; return an error if no node can load the image."""
        image, key = version.image, VersionKey(version.function, version.version)
        holders: Mapping[str, tuple[ImageHolder, ...]] = {}
        if image and targets:
            nodes = step.cache.index.sources(image)
            loading, senders = self.loading(step.cache, image), serving_traffic(step.cache).senders
            sources = choose_sources(image, targets, nodes, loading, senders)
            if sources.error:
                return sources.error
            holders = sources.holders
            if sources.loader is not None:
                self._loaders[key] = sources.loader
            if sources.loader is not None and sources.loader not in {node.id for node in targets}:
                self.prefetching[image, sources.loader] = None
                step.plan.actions.append(PrefetchAction(version=version, node=sources.loader, holders=()))
        max_concurrency = self._settings.max_concurrency(version.task, step.loads[key].scaling)
        min_bytes = self._backoff.min_bytes(key)
        for node in targets:
            instance_id = self._new_id(key)
            self.pending[instance_id] = PendingStart(key=key, node=node.id, image=image)
            space.reserve(version, node, min_bytes)
            step.plan.actions.append(
                StartAction(
                    instance_id=instance_id,
                    version=version,
                    node=node.id,
                    holders=holders.get(node.id, ()),
                    max_concurrency=max_concurrency,
                    room_bytes=arena_room(node, image, space.index.space(node.id).used),
                )
            )
        return ""

    def _add_members(
        self, version: FunctionVersion, group: InstanceGroup, space: ArenaSpace, step: ScalingStep
    ) -> str:
        """Add the starts of a group's members to the plan; return an error if one cannot load its layers."""
        cache, image, key = step.cache, version.image, VersionKey(version.function, version.version)
        assert image is not None
        targets = [cache.index.usable[member.node] for member in group.members]
        loading = self.loading(cache, image)
        sources = choose_part_sources(image, targets, cache.index.with_image(image), loading)
        if sources.error:
            return sources.error
        max_concurrency = self._settings.max_concurrency(version.task, step.loads[key].scaling)
        for member, node in zip(group.members, targets, strict=True):
            self.pending[member.instance_id] = PendingStart(
                key=key,
                node=node.id,
                image=None,
                part_bytes=member.image_bytes,
                counts=member is group.leader,
            )
            room_bytes = space.room(node, None)
            space.reserve(version, node, self._backoff.min_bytes(key), member.image_bytes)
            step.plan.actions.append(
                StartAction(
                    instance_id=member.instance_id,
                    version=version,
                    node=node.id,
                    holders=sources.holders[node.id],
                    max_concurrency=max_concurrency,
                    room_bytes=room_bytes,
                    group=group,
                )
            )
        return ""

    def _defer(
        self, request: StartRequest, version: FunctionVersion, reason: str, step: ScalingStep, fail_at: float
    ) -> StartResult:
        """Fail the queued calls and the floor of a version that no node can start, at `fail_at`."""
        key, now = request.key, step.now
        due = self._backoff.deadline(key, fail_at)
        if now < due:
            step.plan.replan_at(due)
        elif step.loads[key].held or request.has_floor:
            # Not again before all gateways have received the failure.
            self._backoff.set_deadline(key, now + self._settings.backoff_s)
            nodes = islice(step.cache.index.usable, self._settings.max_starts)
            starts = {node: self._new_id(key) for node in nodes}
            step.plan.actions.append(FailStartAction(version=version, starts=starts, reason=reason))
            return StartResult.FAILED
        return StartResult.STUCK


def _known_nodes(cache: ClusterStateCache) -> list[NodeRecord]:
    """Return all nodes, also those that are not usable for a moment."""
    return [entry.record for entry in cache.nodes()]


def loading_nodes(
    image: str,
    state_cache: ClusterStateCache,
    warming: Iterable[tuple[str, str]],
    pending: Iterable[PendingStart],
) -> list[NodeRecord]:
    """Return usable nodes on which the image is arriving, oldest first; `warming` are (image, node)."""
    names = [node for held, node in warming if held == image]
    names += [p.node for p in pending if p.image == image]
    for version in state_cache.versions(image):
        key = VersionKey(version.function, version.version)
        whole = [i for i in state_cache.starting(key) if i.group is None]
        names += [i.node for i in sorted(whole, key=lambda i: i.since)]
    found = []
    for name in dict.fromkeys(names):
        node = state_cache.index.usable.get(name)
        if node is not None and tier_of(node, image) in (Tier.DISK, Tier.NONE):
            found.append(node)
    return found
