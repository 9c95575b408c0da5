"""Which starts become one cast, from whom, and by which plan: pure decisions over what the nodes hold.

All starts and warms of an image in one step are one cast, and so is each that comes while it runs. Nodes
of one host share its memory: one of them takes part, and the others wait for that one.
"""

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gateway.actions import Action, StartOn, WarmOn
from gateway.directory import Directory
from gateway.fixed_plan import FixedPlan
from gateway.known_links import KnownLinks, known_links
from gateway.measured_links import MeasuredLinks
from gateway.placement import tier_of
from gateway.plan import Plan
from rdmacast.planners.automatic import Decision, choose_planner
from rdmacast.planners.topology import Site
from registry.cast import CastMember, CastRecord
from registry.function import FunctionVersion
from registry.images.manifest import UNIT_BYTES
from registry.messages import MAX_CAST_MEMBERS, Holder
from registry.node import NodeRecord, Tier

# A block is read, checked and passed on as a whole: not coarser than this while there are few.
MOST_BLOCK_BYTES = 4 << 20
FEWEST_BLOCKS, MOST_BLOCKS = 16, 512
_KEPT = 256  # where no plan is made, nothing else forgets them
_FEW_SOURCES = 8  # or as many as there are targets: more could not all give

Loading = Callable[[Directory, str], list[NodeRecord]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """How an image comes to some nodes: by `cast` to `members`; `behind` gives each node of a host on which
    another is getting it that one, to wait for."""

    cast: CastRecord | None
    members: frozenset[str] = frozenset()
    behind: Mapping[str, Holder]

    def cast_for(self, node: str) -> CastRecord | None:
        return self.cast if node in self.members else None

    def holders_for(self, node: str, holders: tuple[Holder, ...]) -> tuple[Holder, ...]:
        """Whom the node is to ask, the one first that it waits for."""
        first = self.behind.get(node)
        if first is None:
            return holders
        return (first, *(holder for holder in holders if holder.node != first.node))


class Casts:
    """The casts that this gateway planned, which the directory may not know yet."""

    def __init__(
        self, new_id: Callable[[], str] = lambda: secrets.token_hex(8), fixed: FixedPlan | None = None
    ) -> None:
        self._new_id = new_id
        self._fixed = fixed
        self._latest: dict[str, CastRecord] = {}  # by image

    def __repr__(self) -> str:
        return f"<Casts {list(self._latest.values())!r}>"

    def plan(self, directory: Directory, plan: Plan, loading: Loading, wall_s: float) -> None:
        """Make the starts and warms of each image in `plan` one cast."""
        for image in [image for image in self._latest if not loading(directory, image)]:
            del self._latest[image]
        moves: dict[str, list[StartOn | WarmOn]] = {}
        for action in plan.actions:
            if isinstance(action, StartOn | WarmOn) and action.version.image is not None:
                moves.setdefault(action.version.image, []).append(action)
        deliveries = {
            image: self.deliver(
                directory, together[0].version, {one.node: one.holders for one in together}, loading, wall_s
            )
            for image, together in moves.items()
        }
        plan.actions[:] = [_delivered(action, deliveries) for action in plan.actions]

    def deliver(
        self,
        directory: Directory,
        version: FunctionVersion,
        holders: Mapping[str, tuple[Holder, ...]],
        loading: Loading,
        wall_s: float,
    ) -> Delivery:
        """How the version's image comes to the nodes of `holders`, which names whom each could ask (a node
        that is to read the store: nobody)."""
        image = version.image
        assert image is not None
        nodes = {node.id: node for node in directory.usable_nodes()}
        casts = {record.cast_id: record for record in directory.casts.of(image)}
        taking = {
            name for record in casts.values() for name in _taking_part(directory, nodes, record, record)
        }
        mine = self._latest.get(image)
        if mine is not None and (mine.cast_id not in casts or casts[mine.cast_id].epoch < mine.epoch):
            taking |= _taking_part(directory, nodes, mine, casts.get(mine.cast_id))
            casts = {mine.cast_id: mine} | {**casts, mine.cast_id: mine}
        # `loading` names the new ones as well. Who takes part already only has one more user of its load.
        new = {name: nodes[name] for name in holders if name in nodes and name not in taking}
        scene = _Scene(
            image=image,
            nodes=tuple(nodes.values()),
            arriving=tuple(node for node in loading(directory, image) if node.id not in new),
            targets=tuple(new.values()),
            readers=frozenset(name for name in new if not holders[name]),
        )
        delivery = plan_delivery(
            version, scene, casts.values(), self._new_id, wall_s, directory.links, self._fixed
        )
        cast = delivery.cast
        if cast is not None:
            self._latest.pop(image, None)
            self._latest[image] = cast
            if len(self._latest) > _KEPT:
                del self._latest[next(iter(self._latest))]
        return delivery


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scene:
    """Who has to do with an image: `arriving` are nodes to which it comes already, oldest first; `targets`
    are to get it, and `readers` of them read the store if nobody has it."""

    image: str
    nodes: tuple[NodeRecord, ...]
    arriving: tuple[NodeRecord, ...]
    targets: tuple[NodeRecord, ...]
    readers: frozenset[str]

    @property
    def givers(self) -> tuple[NodeRecord, ...]:
        """Nodes with a complete copy that all can read."""
        return tuple(
            node
            for node in self.nodes
            if self.holds_host(node) or (node.gives_from_arena and tier_of(node, self.image) is Tier.GPU)
        )

    def holds_host(self, node: NodeRecord) -> bool:
        return any(h.image == self.image and Tier.HOST in h.tiers for h in node.holdings)

    @property
    def loader(self) -> NodeRecord | None:
        """The target that gets the image by itself, if nobody can give it to all or is getting it: it reads
        the store, or what only a GPU has, which one beside that GPU does best."""
        if self.givers or self.arriving:
            return None
        gpus = {node.host for node in self.nodes if tier_of(node, self.image) is Tier.GPU}
        able = [
            node
            for node in self.targets
            if node.id in self.readers or (gpus and tier_of(node, self.image) is not Tier.GPU)
        ]
        return min(able, key=lambda node: node.host not in gpus, default=None)


def _taking_part(
    directory: Directory, nodes: Mapping[str, NodeRecord], record: CastRecord, published: CastRecord | None
) -> set[str]:
    """Nodes to which the image is coming by the cast, and those it comes from, until it is over; the
    directory knows it as `published`. One that has another address by now is another process."""
    awaited = set(directory.cast_ends.awaited(record.cast_id))
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
    scene: _Scene,
    running: Iterable[CastRecord],
    new_id: Callable[[], str],
    wall_s: float,
    links: MeasuredLinks,
    told: FixedPlan | None = None,
) -> Delivery:
    """Join one of the casts of the image that run, the first best, or make a new one if anybody can give."""
    needy, behind = _split(scene)
    for record in running:
        if _runs(record, scene):
            joined = join(record, needy, wall_s)
            if joined is not None:
                fixed = {record.members[source].node for source in record.sources}
                members = frozenset(node.id for node in needy if node.id not in fixed)
                return Delivery(cast=joined, members=members, behind=behind)
    sources = _sources(scene, needy)
    sources = sources[: max(MAX_CAST_MEMBERS // 2, MAX_CAST_MEMBERS - len(needy))]
    giving = {source.id for source in sources}
    needy = [node for node in needy if node.id not in giving]
    needy = needy[: MAX_CAST_MEMBERS - len(sources)]  # the others ask the holders
    if not sources or not needy or version.image_bytes <= 0:
        return Delivery(cast=None, behind=behind)
    known = known_links([*sources, *needy], links)
    cast = new_cast(version, sources, needy, new_id(), wall_s, known)
    if told is not None:
        cast = told.of(cast, known.facts.bytes_per_s)
    return Delivery(cast=cast, members=frozenset(node.id for node in needy), behind=behind)


def new_cast(
    version: FunctionVersion,
    sources: Sequence[NodeRecord],
    targets: Sequence[NodeRecord],
    cast_id: str,
    wall_s: float,
    links: KnownLinks,
) -> CastRecord:
    """Fast nodes come first, so that in a chain none waits for a slower one."""
    assert version.image is not None
    order = [
        *sorted(sources, key=lambda node: -links.rates[node.id]),
        *sorted(targets, key=lambda node: -links.rates[node.id]),
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
        in_turn=decision.in_turn,
        link_bytes_s=links.least_of(
            node.id for place, node in enumerate(order) if place not in decision.edge
        ),
    )


def join(record: CastRecord, targets: Sequence[NodeRecord], wall_s: float) -> CastRecord | None:
    """The cast with these nodes in it; None if that would be nobody, or too many."""
    members = {member.node: member for member in record.members}
    fixed = {record.members[source].node for source in record.sources}
    late = [node for node in targets if node.id not in fixed]
    # One that was a member before may have another address by now.
    epoch = record.epoch + 1
    members.update((node.id, _member(node, record.image, epoch, wall_s)) for node in late)
    if not late or len(members) > MAX_CAST_MEMBERS:
        return None
    return replace(record, members=tuple(members.values()), epoch=epoch)


def choose(nodes: Sequence[NodeRecord], sources: int, nbytes: int, links: KnownLinks) -> Decision:
    """Planner and number of blocks for these nodes, of which the first `sources` hold the image.

    The nodes are told no rates: what is chosen is what each can work out from their order alone.
    """
    facts = links.facts
    sites = [Site(bytes_per_s=links.rates[node.id]) for node in nodes]
    decision = choose_planner(nodes=len(nodes), sources=sources, nbytes=nbytes, facts=facts, sites=sites)
    units = -(-nbytes // UNIT_BYTES)
    least = min(units, MOST_BLOCKS, max(FEWEST_BLOCKS, -(-nbytes // MOST_BLOCK_BYTES)))
    # Of whole units there may be fewer: what is said is of those that there are.
    blocks = -(-nbytes // block_bytes(nbytes, max(decision.blocks, least)))
    if blocks != decision.blocks:
        decision = choose_planner(
            nodes=len(nodes), sources=sources, nbytes=nbytes, facts=facts, sites=sites, blocks=blocks
        )
    return replace(decision, sites=None, reason=f"{decision.reason} ({links.said})")


def block_bytes(nbytes: int, blocks: int) -> int:
    """The size of about so many blocks, in whole units, since these are what is checked."""
    units = max(1, round(nbytes / (blocks * UNIT_BYTES)), -(-nbytes // (MOST_BLOCKS * UNIT_BYTES)))
    return units * UNIT_BYTES


def _split(scene: _Scene) -> tuple[list[NodeRecord], dict[str, Holder]]:
    """The targets that must get the image over a link, and whom the others of their hosts wait for."""
    held = {node.host for node in scene.givers if scene.holds_host(node)}
    loader = scene.loader
    first = {node.host: node for node in reversed((*(() if loader is None else (loader,)), *scene.arriving))}
    needy, behind = [], {}
    for target in scene.targets:
        if target.host in held or tier_of(target, scene.image) is Tier.GPU:
            continue
        before = first.setdefault(target.host, target)
        if before is target:
            needy.append(target)
        elif before.id != target.id:
            behind[target.id] = Holder(
                node=before.id, host=before.host, cast=before.cast, tier=Tier.HOST.value
            )
    return [node for node in needy if node is not loader], behind


def _sources(scene: _Scene, needy: Sequence[NodeRecord]) -> list[NodeRecord]:
    """Who gives: one node of each host with a copy, host memory before an accelerator's, those beside a
    target first; else the node to which it came first; else the one that gets it by itself."""
    if not scene.givers:
        return list(scene.arriving[:1]) or ([scene.loader] if scene.loader is not None else [])
    near = {node.host for node in needy}
    best = sorted(scene.givers, key=lambda n: (n.host not in near, not scene.holds_host(n), n.id))
    one_a_host = {node.host: node for node in reversed(best)}
    chosen = [node for node in best if one_a_host[node.host] is node]
    return chosen[: max(_FEW_SOURCES, len(needy))]


def _runs(record: CastRecord, scene: _Scene) -> bool:
    """Whether the image is still coming to somebody by the cast, and one of its sources is left."""
    giving = {node.id for node in (*scene.givers, *scene.arriving)}
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
        tier=tier or tier_of(node, image),
        epoch=epoch,
        joined_at=joined_at,
    )


def _delivered(action: Action, deliveries: Mapping[str, Delivery]) -> Action:
    """The action, which names its cast where it has one."""
    if not isinstance(action, StartOn | WarmOn) or action.version.image is None:
        return action
    delivery = deliveries[action.version.image]
    holders = delivery.holders_for(action.node, action.holders)
    return replace(action, holders=holders, cast=delivery.cast_for(action.node))
