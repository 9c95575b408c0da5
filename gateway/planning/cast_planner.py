"""Planning of casts: which starts become one cast, its sources, and its transfer plan. Pure.

All starts and prefetches of an image in one step form one cast, which later ones join while it runs. Nodes of
one host share its memory: one of them is a member, and the others wait for it. Nodes that send K and V are no
sources where the others are nearly as fast without them; else they send what serving leaves of their links.
"""

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gateway.cluster.link_estimates import LinkEstimates, estimate_links
from gateway.cluster.link_rates import LinkRateCache
from gateway.cluster.node_space import tier_of
from gateway.cluster.state_cache import ClusterStateCache
from gateway.core.fixed_plan import FixedPlan
from gateway.planning.actions import Action, PrefetchAction, StartAction
from gateway.planning.cast_nodes import DeliveryNodes, sources_of_cast, split_targets
from gateway.planning.plan import Plan
from gateway.planning.serving_traffic import NO_TRAFFIC, ServingTraffic, serving_traffic
from rdmacast.cast.record import CastMember
from rdmacast.plan.planners.automatic import PlannerChoice, choose_planner
from rdmacast.plan.topology import NodeTopology, is_flat
from registry.images.manifest import block_bytes, min_blocks
from registry.messages.images import MAX_CAST_MEMBERS, ImageHolder
from registry.records.cast import CastRecord
from registry.records.function import FunctionVersion
from registry.records.node import NodeRecord, Tier

_MAX_CASTS = 256  # a gateway without the lease removes none otherwise
# How many times longer a cast may take to leave the links of serving nodes alone.
_MAX_LONGER = 1.15

LoadingNodes = Callable[[ClusterStateCache, str], list[NodeRecord]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageDelivery:
    """The delivery of an image to some nodes: by `cast` to `members`.

    `behind` maps each node of which another node of the host loads the image to that one, to wait for.
    """

    cast: CastRecord | None
    members: frozenset[str] = frozenset()
    behind: Mapping[str, ImageHolder]

    def cast_for(self, node: str) -> CastRecord | None:
        """Return the cast if the node is a member."""
        return self.cast if node in self.members else None

    def holders_for(self, node: str, holders: tuple[ImageHolder, ...]) -> tuple[ImageHolder, ...]:
        """Return the holders for the node, first the one that it waits for."""
        first = self.behind.get(node)
        if first is None:
            return holders
        return (first, *(holder for holder in holders if holder.node != first.node))


class CastPlanner:
    """A planner of casts, which holds those planned here until the state cache has them."""

    def __init__(
        self, new_id: Callable[[], str] = lambda: secrets.token_hex(8), fixed: FixedPlan | None = None
    ) -> None:
        self._new_id = new_id
        self._fixed = fixed
        self._latest: dict[str, CastRecord] = {}  # by image

    def __repr__(self) -> str:
        return f"<CastPlanner {list(self._latest.values())!r}>"

    def plan(self, state_cache: ClusterStateCache, plan: Plan, loading: LoadingNodes, wall_s: float) -> None:
        """Combine the starts and prefetches of each image in `plan` into one cast."""
        for image in [image for image in self._latest if not loading(state_cache, image)]:
            del self._latest[image]
        moves: dict[str, list[StartAction | PrefetchAction]] = {}
        for action in plan.actions:
            if isinstance(action, StartAction | PrefetchAction) and action.loads_whole:
                assert action.version.image is not None
                moves.setdefault(action.version.image, []).append(action)
        deliveries = {
            image: self.deliver(
                state_cache, together[0].version, {one.node: one.holders for one in together}, loading, wall_s
            )
            for image, together in moves.items()
        }
        plan.actions[:] = [_delivered(action, deliveries) for action in plan.actions]

    def deliver(
        self,
        state_cache: ClusterStateCache,
        version: FunctionVersion,
        holders: Mapping[str, tuple[ImageHolder, ...]],
        loading: LoadingNodes,
        wall_s: float,
    ) -> ImageDelivery:
        """Plan the delivery of the version's image to the nodes of `holders`.

        `holders` has the sources of each node, none for a node that reads the store.
        """
        image = version.image
        assert image is not None
        nodes = state_cache.index.usable
        casts = {record.cast_id: record for record in state_cache.casts.of_image(image)}
        taking = {
            name for record in casts.values() for name in _active_members(state_cache, nodes, record, record)
        }
        mine = self._latest.get(image)
        if mine is not None and (mine.cast_id not in casts or casts[mine.cast_id].epoch < mine.epoch):
            taking |= _active_members(state_cache, nodes, mine, casts.get(mine.cast_id))
            casts = {mine.cast_id: mine} | {**casts, mine.cast_id: mine}
        # `loading` includes the new nodes. A node that is a member already only gets another user of its
        # load.
        new = {name: nodes[name] for name in holders if name in nodes and name not in taking}
        scene = DeliveryNodes(
            image=image,
            holders=tuple(state_cache.index.with_image(image)),
            arriving=tuple(node for node in loading(state_cache, image) if node.id not in new),
            targets=tuple(new.values()),
            readers=frozenset(name for name in new if not holders[name]),
            traffic=serving_traffic(state_cache),
        )
        delivery = plan_delivery(
            version, scene, casts.values(), self._new_id, wall_s, state_cache.link_rates, self._fixed
        )
        cast = delivery.cast
        if cast is not None:
            self._latest.pop(image, None)
            self._latest[image] = cast
            if len(self._latest) > _MAX_CASTS:
                del self._latest[next(iter(self._latest))]
        return delivery


def _active_members(
    state_cache: ClusterStateCache,
    nodes: Mapping[str, NodeRecord],
    record: CastRecord,
    published: CastRecord | None,
) -> set[str]:
    """Return the pending targets and the sources of a running cast; `published` is its cached record.

    A node with another address than in the cast is another process, and not included.
    """
    awaited = set(state_cache.cast_tracker.pending_nodes(record.cast_id))
    if published is not record:
        before = set() if published is None else {member.node for member in published.members}
        awaited |= {member.node for member in record.targets} - before
    if not awaited:
        return set()
    part = awaited | {record.members[source].node for source in record.sources}
    return {
        member.node
        for member in record.members
        if member.node in part and member.node in nodes and nodes[member.node].cast == member.address
    }


def plan_delivery(
    version: FunctionVersion,
    scene: DeliveryNodes,
    running: Iterable[CastRecord],
    new_id: Callable[[], str],
    wall_s: float,
    links: LinkRateCache,
    fixed: FixedPlan | None = None,
) -> ImageDelivery:
    """Join the first suitable running cast of the image, or plan a new one if there is a source."""
    needy, behind = split_targets(scene)
    for record in running:
        if _runs(record, scene):
            joined = join(record, needy, wall_s)
            if joined is not None:
                fixed_nodes = {record.members[source].node for source in record.sources}
                members = frozenset(node.id for node in needy if node.id not in fixed_nodes)
                return ImageDelivery(cast=joined, members=members, behind=behind)
    sources = sources_of_cast(scene, needy)
    sources = sources[: max(MAX_CAST_MEMBERS // 2, MAX_CAST_MEMBERS - len(needy))]
    found = len(sources)
    sources = _without_senders(sources, needy, scene.traffic, version.image_bytes, links)
    giving = {source.id for source in sources}
    needy = [node for node in needy if node.id not in giving]
    needy = needy[: MAX_CAST_MEMBERS - len(sources)]  # the others pull from the holders
    if not sources or not needy or version.image_bytes <= 0:
        return ImageDelivery(cast=None, behind=behind)
    known = estimate_links([*sources, *needy], links)
    cast = new_cast(version, sources, needy, new_id(), wall_s, known, scene.traffic)
    if len(sources) < found:
        cast = replace(cast, reason=f"{cast.reason}; {found - len(sources)} more hold it, but send K and V")
    if fixed is not None:
        cast = fixed.apply(cast, known.facts.bytes_per_s)
    return ImageDelivery(cast=cast, members=frozenset(node.id for node in needy), behind=behind)


def new_cast(
    version: FunctionVersion,
    sources: Sequence[NodeRecord],
    targets: Sequence[NodeRecord],
    cast_id: str,
    wall_s: float,
    links: LinkEstimates,
    traffic: ServingTraffic = NO_TRAFFIC,
) -> CastRecord:
    """Return a new cast in which fast nodes come first, so that in a chain none waits for a slower one.

    After them come nodes whose links serving uses: the last in a chain sends nothing, and none waits for it.
    """
    assert version.image is not None
    order = [
        *sorted(sources, key=lambda node: (node.id in traffic.senders, -links.rates[node.id])),
        *sorted(targets, key=lambda node: (traffic.involves(node.id), -links.rates[node.id])),
    ]
    decision = choose(order, len(sources), version.image_bytes, links)
    return CastRecord(
        cast_id=cast_id,
        image=version.image,
        function=version.function,
        version=version.version,
        nbytes=version.image_bytes,
        block_bytes=block_bytes(version.image_bytes, decision.blocks),
        planner=decision.planner,
        reason=decision.reason,
        members=tuple(_member(node, version.image) for node in order),
        sources=tuple(range(len(sources))),
        planned=len(order),
        started_at=wall_s,
        edge=decision.edge,
        in_slots=decision.in_slots,
        link_bytes_s=links.min_rate(
            node.id for place, node in enumerate(order) if place not in decision.edge
        ),
    )


def join(record: CastRecord, targets: Sequence[NodeRecord], wall_s: float) -> CastRecord | None:
    """Return the cast with `targets` added; None if that adds no node, or too many."""
    members = {member.node: member for member in record.members}
    fixed = {record.members[source].node for source in record.sources}
    late = [node for node in targets if node.id not in fixed]
    # A former member may have a new address.
    epoch = record.epoch + 1
    members.update((node.id, _member(node, record.image, epoch, wall_s)) for node in late)
    if not late or len(members) > MAX_CAST_MEMBERS:
        return None
    return replace(record, members=tuple(members.values()), epoch=epoch)


def choose(nodes: Sequence[NodeRecord], sources: int, nbytes: int, links: LinkEstimates) -> PlannerChoice:
    """Choose planner and number of blocks for these nodes, of which the first `sources` hold the image.

    Nodes do not receive link rates: each computes the same plan from the members' order and topology.
    """
    facts = links.facts
    sites = [
        NodeTopology(leaf=node.leaf, domain=node.domain, bytes_per_s=links.rates[node.id]) for node in nodes
    ]
    decision = choose_planner(nodes=len(nodes), sources=sources, nbytes=nbytes, facts=facts, sites=sites)
    # Blocks of whole units may be fewer: the reason refers to the actual number.
    blocks = -(-nbytes // block_bytes(nbytes, max(decision.blocks, min_blocks(nbytes))))
    if blocks != decision.blocks:
        decision = choose_planner(
            nodes=len(nodes), sources=sources, nbytes=nbytes, facts=facts, sites=sites, blocks=blocks
        )
    known = () if is_flat(sites) else decision.sites
    return replace(decision, sites=known, reason=f"{decision.reason} ({links.summary})")


def _without_senders(
    sources: Sequence[NodeRecord],
    needy: Sequence[NodeRecord],
    traffic: ServingTraffic,
    nbytes: int,
    links: LinkRateCache,
) -> list[NodeRecord]:
    """Return the sources without those that send K and V, unless the cast takes much longer without them."""
    quiet = [node for node in sources if node.id not in traffic.senders]
    if not quiet or not needy or len(quiet) == len(sources) or nbytes <= 0:
        return list(sources)

    def predicted_s(chosen: Sequence[NodeRecord]) -> float:
        known = estimate_links([*chosen, *needy], links)
        return choose([*chosen, *needy], len(chosen), nbytes, known).predicted_s

    return quiet if predicted_s(quiet) <= _MAX_LONGER * predicted_s(sources) else list(sources)


def _runs(record: CastRecord, scene: DeliveryNodes) -> bool:
    """Return whether a target of the cast is still loading, and one of its sources is left."""
    giving = {node.id for node in (*scene.sources, *scene.arriving)}
    coming = {node.id for node in scene.arriving}
    return any(member.node in coming for member in record.targets) and any(
        record.members[source].node in giving for source in record.sources
    )


def _member(node: NodeRecord, image: str, epoch: int = 0, joined_at: float = 0.0) -> CastMember:
    tier = Tier.HOST if any(h.image == image and Tier.HOST in h.tiers for h in node.holdings) else None
    return CastMember(
        node=node.id,
        host=node.host,
        address=node.cast,
        tier=(tier or tier_of(node, image)).value,
        epoch=epoch,
        joined_at=joined_at,
        leaf=node.leaf,
        domain=node.domain,
    )


def _delivered(action: Action, deliveries: Mapping[str, ImageDelivery]) -> Action:
    """Return the action with its cast and holders."""
    if not isinstance(action, StartAction | PrefetchAction) or not action.loads_whole:
        return action
    assert action.version.image is not None
    delivery = deliveries[action.version.image]
    holders = delivery.holders_for(action.node, action.holders)
    return replace(action, holders=holders, cast=delivery.cast_for(action.node))
