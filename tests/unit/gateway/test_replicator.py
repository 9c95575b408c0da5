"""Host copies of deployed images: pins and their end, drops, and space made for starts. Pure."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from gateway.cluster.state_cache import ClusterStateCache, VersionKey
from gateway.planning.actions import DropAction, PrefetchAction, StartAction, UnpinAction
from gateway.planning.image_owners import is_outdated, score
from gateway.planning.plan import PendingStart, Plan
from gateway.planning.planner import ScalingPlanner
from gateway.planning.policy import ConcurrencyTarget
from gateway.planning.replicator import Replicator
from registry.messages.images import ImageHolder
from registry.records.change import FunctionChanged, FunctionDeleted, InstanceChanged, NodeUp
from registry.records.engine import EngineKind
from registry.records.function import Function, FunctionVersion, Scaling
from registry.records.instance import InstanceState
from registry.records.node import CachedImage, NodeRecord, Tier
from tests.fixtures.control import MIB, digest, make_holding, make_instance, make_node, make_version

WALL = 10_000.0


class World:
    """A state cache, and a replicator whose actions are executed at once."""

    def __init__(self, **deployed: str) -> None:
        self.state_cache = ClusterStateCache()
        self.planner = ScalingPlanner(ConcurrencyTarget(), str)
        self.replicator = Replicator(self.planner)
        self.now = 0.0
        for name, image in deployed.items():
            self.deploy(name, image)

    def node(self, id_: str, *holdings: CachedImage, **changes: object) -> NodeRecord:
        used = sum(h.bytes for h in holdings)
        known = self.state_cache.node(id_)
        limit = known.record.host_bytes if known else changes.pop("host_bytes", 2 * MIB)
        record = make_node(
            id_, holdings=holdings, host_bytes=limit, host_free_bytes=max(0, limit - used), **changes
        )
        self.state_cache.apply(NodeUp(record=record, ttl_s=60.0), self.now)
        self.state_cache.channel_up(id_, record.epoch)
        return record

    def deploy(self, name: str, image: str, version: int = 1) -> FunctionVersion:
        made = make_version(name, version, image=image)
        head = Function(
            name=name,
            current=version,
            versions=tuple(range(1, version + 1)),
            scaling=Scaling(),
            created_at=0.0,
        )
        self.state_cache.apply(FunctionChanged(function=head, version=made), self.now)
        return made

    def plan(self, *starts: StartAction) -> Plan:
        plan = Plan(actions=list(starts))
        for start in starts:
            self.planner.pending[start.instance_id] = PendingStart(
                key=VersionKey(start.version.function, start.version.version),
                node=start.node,
                image=start.version.image,
            )
        self.replicator.plan(self.state_cache, plan, self.now, WALL + self.now)
        return plan

    def execute(self, plan: Plan) -> None:
        for action in plan.actions:
            if isinstance(action, PrefetchAction):
                self.planner.on_prefetched(action.version.image or "", action.node)
                self.change(action.node, action.version.image or "", pinned=action.pin, bytes=MIB)
            elif isinstance(action, UnpinAction):
                self.change(action.node, action.image, pinned=False)

    def change(self, node: str, image: str, **changes: object) -> None:
        entry = self.state_cache.node(node)
        assert entry is not None
        held = {holding.image: holding for holding in entry.record.holdings}
        fresh = CachedImage(image=image, tiers=(Tier.HOST,), bytes=MIB, last_used_at=WALL)
        held[image] = replace(held.get(image, fresh), **changes)  # type: ignore[arg-type]
        self.node(node, *held.values(), host=entry.record.host)

    def settle(self) -> list[object]:
        """Plan and execute until nothing is left to do; return all actions."""
        done: list[object] = []
        for _ in range(10):
            plan = self.plan()
            if not plan.actions:
                return done
            done += plan.actions
            self.execute(plan)
        raise AssertionError(f"no end: {done}")

    def owners(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for node in self.state_cache.usable_nodes():
            for holding in node.holdings:
                if holding.pinned:
                    found.setdefault(holding.image, []).append(node.id)
        return found


def held(image: str, *, pinned: bool = False, used: float = WALL) -> CachedImage:
    return replace(make_holding(image, Tier.HOST, last_used_at=used), pinned=pinned)


def start(name: str, version: FunctionVersion, node: str) -> StartAction:
    return StartAction(instance_id=name, version=version, node=node, holders=(), max_concurrency=1)


def test_a_holder_becomes_the_owner_and_no_byte_moves() -> None:
    world = World(f="a")
    world.node("n0")
    world.node("n1", held("a"))
    assert [(type(a), a.node, a.pin) for a in world.plan().actions] == [(PrefetchAction, "n1", True)]
    assert world.plan().actions == []  # it is asked for once
    world.planner.on_prefetched(digest("a"), "n1")
    assert world.settle() and world.owners() == {digest("a"): ["n1"]}
    assert world.settle() == []


def test_owners_are_spread_by_bytes() -> None:
    world = World(**dict(zip("abcdef", "abcdef", strict=True)))
    for node in ("n0", "n1", "n2"):
        world.node(node, host_bytes=8 * MIB)
    world.settle()
    counts = [len([h for h in n.holdings if h.pinned]) for n in world.state_cache.usable_nodes()]
    assert counts == [2, 2, 2]
    assert all(len(nodes) == 1 for nodes in world.owners().values()) and len(world.owners()) == 6


def test_a_dead_owner_is_replaced_by_a_holder_and_yields_when_it_is_back() -> None:
    world = World(f="a")
    world.node("n0", held("a", pinned=True))
    world.node("n1", held("a"))
    assert world.settle() == []
    world.state_cache.channel_down("n0")
    world.settle()
    assert world.owners() == {digest("a"): ["n1"]}
    world.state_cache.channel_up("n0", 1)
    world.settle()
    assert [len(nodes) for nodes in world.owners().values()] == [1]


def test_what_is_no_longer_deployed_is_not_kept() -> None:
    world = World(f="old", g="gone")
    world.node("n0", held("old", pinned=True), held("gone", pinned=True))
    world.deploy("f", "new", version=2)
    world.node("n1", held("new", pinned=True))
    assert is_outdated(world.state_cache, digest("old")) and not is_outdated(world.state_cache, digest("new"))
    assert world.settle() == [UnpinAction(image=digest("old"), node="n0")]
    world.state_cache.apply(FunctionDeleted(name="g"), 0.0)
    plan = world.plan()
    assert plan.actions == [] and plan.next_at == 30.0  # it might have been a deploy under way
    world.now = 30.0
    assert world.settle() == [UnpinAction(image=digest("gone"), node="n0")]


def test_a_copy_that_a_deploy_has_just_made_stays_kept() -> None:
    world = World()
    world.node("n0", held("a", pinned=True))
    assert world.settle() == []
    world.deploy("f", "a")
    world.now = 100.0
    assert world.settle() == []


def test_the_kept_copy_is_never_surplus() -> None:
    world = World(f="a")
    world.node("n0", held("a", pinned=True, used=1.0))
    world.node("n1", held("a", used=2.0))
    assert world.plan().actions == [DropAction(image=digest("a"), node="n1", tier=Tier.HOST)]


def on_gpu(image: str, *, settled: bool = True, used: float = WALL) -> CachedImage:
    return replace(make_holding(image, Tier.GPU, Tier.HOST, last_used_at=used), settled=settled)


def dropped(world: World) -> list[tuple[str, str]]:
    return [(a.image, a.node) for a in world.plan().actions if isinstance(a, DropAction)]


def serve(world: World, name: str, node: str, state: InstanceState = InstanceState.READY) -> None:
    record = make_instance(f"{name}-{node}", node, name=name, state=state)
    world.state_cache.apply(InstanceChanged(record=record), world.now)


def test_what_accelerators_serve_leaves_host_memory_but_for_the_kept_copy() -> None:
    world = World(f="a")
    world.node("n0", replace(on_gpu("a"), pinned=True))
    for node in ("n1", "n2", "n3", "n4"):
        world.node(node, on_gpu("a"))
    world.node("n5", replace(held("a"), settled=True))
    for node in ("n0", "n1"):
        serve(world, "f", node)
    serve(world, "f", "n2", InstanceState.DRAINING)
    serve(world, "f", "n3", InstanceState.LOADING)
    serve(world, "f", "n5")
    assert dropped(world) == [(digest("a"), "n1"), (digest("a"), "n2")]
    assert dropped(world) == [], "until the nodes report it, or a while has passed"


def test_a_copy_that_is_not_checked_yet_stays() -> None:
    world = World(f="a")
    world.node("n0", held("a", pinned=True))
    world.node("n1", on_gpu("a", settled=False), host="h")
    world.node("n2", on_gpu("a"), host="h")
    serve(world, "f", "n1")
    serve(world, "f", "n2")
    assert dropped(world) == []
    world.node("n1", on_gpu("a"), host="h")
    assert len(dropped(world)) == 1


def test_a_copy_stays_while_a_node_of_the_host_loads_it() -> None:
    world = World(f="a")
    world.node("n0", held("a", pinned=True))
    world.node("n1", on_gpu("a"), host="h")
    world.node("n2", replace(held("a"), settled=True), host="h")
    serve(world, "f", "n1")
    serve(world, "f", "n2", InstanceState.LOADING)
    assert dropped(world) == []
    serve(world, "f", "n2")
    assert dropped(world) == [], "it has no copy of its own"
    world.node("n2", on_gpu("a"), host="h")
    assert len(dropped(world)) == 1


def test_copies_leave_the_hosts_of_gpus_too() -> None:
    world = World(f="a")
    world.node("n0", held("a", pinned=True))
    world.node("n1", on_gpu("a"), device="cuda:0")
    serve(world, "f", "n1")
    assert dropped(world) == [(digest("a"), "n1")]


def with_copies(world: World, *starts: StartAction) -> list[str]:
    """Return the starts that bring the image into host memory."""
    return [a.instance_id for a in world.plan(*starts).actions if isinstance(a, StartAction) and a.host_copy]


def test_starts_make_no_host_copies_but_the_first_of_an_image_of_which_one_is_kept() -> None:
    world = World(f="a")
    version = world.state_cache.current("f")
    assert version is not None
    for node in ("n0", "n1", "n2"):
        world.node(node)
    holder = ImageHolder(node="n1", host="host-n1", cast="", tier="host")
    waits = replace(start("i0", version, "n0"), holders=(holder,))
    assert with_copies(
        world, waits, start("i1", version, "n1"), replace(waits, instance_id="i2", node="n2")
    ) == ["i1"]
    assert with_copies(world, start("i3", version, "n0")) == [], "it is arriving"
    world.planner.pending.clear()
    world.node("n2", held("a", pinned=True))
    assert with_copies(world, start("i4", version, "n0"), start("i5", version, "n1")) == []


def test_starts_of_one_host_share_a_host_copy_if_it_has_room() -> None:
    world = World(f="a")
    version = world.state_cache.current("f")
    assert version is not None
    world.node("n0", held("a", pinned=True))
    for node, nbytes in (("n1", 2 * MIB), ("n2", 2 * MIB), ("n3", 1), ("n4", 1)):
        world.node(node, host=f"h{nbytes}", host_bytes=nbytes)
    starts = [start(f"i{number}", version, f"n{number}") for number in range(1, 5)]
    assert with_copies(world, *starts) == ["i1", "i2"]


def test_starts_keep_copies_within_the_bytes_for_served_ones_and_for_other_engines() -> None:
    world = World(f="a", g="b")
    world.replicator = Replicator(world.planner, served_copies_bytes=MIB)
    first, second = world.state_cache.current("f"), world.state_cache.current("g")
    assert first is not None and second is not None
    world.node("n0", held("a", pinned=True), held("b", pinned=True))
    world.node("n1")
    assert with_copies(world, start("i1", first, "n1"), start("i2", second, "n1")) == ["i1"]
    mapped = replace(second, engine=EngineKind.VLLM)
    assert with_copies(world, start("i3", first, "n1"), start("i4", mapped, "n1")) == ["i3", "i4"]


def test_other_engines_map_the_host_copy() -> None:
    world = World(f="a")
    made = replace(world.deploy("f", "a"), engine=EngineKind.VLLM)
    head = world.state_cache.functions["f"]
    world.state_cache.apply(FunctionChanged(function=head, version=made), 0.0)
    world.node("n0", held("a", pinned=True))
    world.node("n1", on_gpu("a"))
    serve(world, "f", "n1")
    assert dropped(world) == []


def test_a_host_keeps_served_copies_within_its_bytes_the_latest_used_first() -> None:
    world = World(a="a", b="b", c="c")
    world.replicator = Replicator(world.planner, served_copies_bytes=2 * MIB)
    world.node("n1", on_gpu("a", used=WALL - 3), on_gpu("b", used=WALL - 9), on_gpu("c"), host_bytes=8 * MIB)
    for name in "abc":
        head = replace(world.state_cache.functions[name], scaling=Scaling(host_copies=0))
        version = world.state_cache.current(name)
        assert version is not None
        world.state_cache.apply(FunctionChanged(function=head, version=version), world.now)
        serve(world, name, "n1")
    assert dropped(world) == [(digest("b"), "n1")]


def test_a_start_waits_until_others_keep_what_it_would_push_out() -> None:
    world = World(f="a", g="b")
    version = world.deploy("h", "c")
    world.node("n0", held("a", pinned=True, used=WALL - 2), held("b", pinned=True, used=WALL - 1))
    world.node("n1", held("c", pinned=True))
    version = replace(version, engine=EngineKind.VLLM)  # its starts make host copies
    plan = world.plan(start("i", version, "n0"))
    (move,) = plan.actions
    moved, stays = sorted((digest("a"), digest("b")), key=lambda image: score(image, "host-n0", 2 * MIB))
    assert isinstance(move, PrefetchAction) and move.version.image == moved and move.pin
    assert (move.node, [h.node for h in move.holders]) == ("n1", ["n0"])
    assert world.planner.pending == {}  # it will be placed anew
    world.execute(plan)
    plan = world.plan(start("i", version, "n0"))
    assert plan.actions == [UnpinAction(image=moved, node="n0")]
    world.execute(plan)
    again = start("i", version, "n0")
    assert world.plan(again).actions == [replace(again, host_copy=True)]
    assert world.owners() == {moved: ["n1"], stays: ["n0"], digest("c"): ["n1"]}


def test_a_start_does_not_wait_where_nobody_can_take_over_or_for_too_long() -> None:
    world = World(f="a")
    version = world.deploy("h", "c")
    world.node("n0", held("a", pinned=True), host_bytes=MIB)
    world.node("n1", held("c", pinned=True), host_bytes=MIB)
    only = start("i", replace(version, engine=EngineKind.VLLM), "n0")
    assert with_copies(world, only) == ["i"]
    world.node("n2", host_bytes=MIB)
    assert with_copies(world, only) == []
    world.now = 10.0
    assert with_copies(world, only) == ["i"]


def test_kept_copies_move_to_hosts_that_join_later() -> None:
    world = World(**dict(zip("abcd", "abcd", strict=True)))
    world.node("n0", *(held(name, pinned=True) for name in "abcd"), host_bytes=8 * MIB)
    assert world.settle() == []
    world.node("n1", host_bytes=8 * MIB)
    world.settle()
    assert sorted(len(nodes) for nodes in world.owners().values()) == [1, 1, 1, 1]
    assert sum(nodes == ["n1"] for nodes in world.owners().values()) == 2


@given(
    st.lists(
        st.tuples(st.sampled_from(("join", "leave", "deploy", "delete")), st.integers(0, 5)), max_size=25
    )
)
def test_each_deployed_image_has_one_pinned_copy_after_any_change(steps: list[tuple[str, int]]) -> None:
    world = World()
    world.node("n0", host_bytes=32 * MIB)
    there, deployed = {"n0"}, set[str]()
    for step, number in steps:
        node, name = f"n{number}", "abcdef"[number]
        if step == "join" and node not in there:
            there.add(node)
            if world.state_cache.node(node) is None:
                world.node(node, host_bytes=32 * MIB)
            world.state_cache.channel_up(node, 1)
        elif step == "leave" and len(there) > 1:
            there.discard(node)
            world.state_cache.channel_down(node)
        elif step == "deploy":
            deployed.add(name)
            world.deploy(name, name)
        elif step == "delete" and name in deployed:
            deployed.discard(name)
            world.state_cache.apply(FunctionDeleted(name=name), world.now)
        world.now += 100.0
        world.settle()
        owners = world.owners()
        assert owners.keys() == {digest(name) for name in deployed}
        assert all(len(nodes) == 1 for nodes in owners.values())


def test_what_no_version_has_any_more_is_dropped_from_disks_once_a_host() -> None:
    world = World(f="a")
    on_disk = [replace(held(image, used=1.0), tiers=(Tier.DISK,)) for image in ("a", "gone")]
    for node, host in (("n0", "h0"), ("n1", "h0"), ("n2", "h1")):
        world.node(node, *on_disk, host=host)
    dropped = [action for action in world.plan().actions if isinstance(action, DropAction)]
    assert dropped == [DropAction(image=digest("gone"), node=node, tier=Tier.DISK) for node in ("n0", "n2")]
    assert not [
        action for action in world.plan().actions if isinstance(action, DropAction)
    ]  # not at once again


def test_an_image_of_a_deploy_under_way_stays_on_the_disk() -> None:
    world = World()
    world.node("n0", replace(held("new", used=WALL), tiers=(Tier.DISK,)))
    plan = world.plan()
    assert plan.actions == [] and plan.next_at == 30.0
