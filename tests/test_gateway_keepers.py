"""Which host keeps which image: designation, its end, and room made for starts. Pure."""

from dataclasses import replace

from control_fixture import MIB, digest, make_holding, make_node, make_version

from gateway.actions import DropFrom, StartOn, UnkeepOn, WarmOn
from gateway.directory import Directory, VersionKey
from gateway.keepers import is_outdated
from gateway.plan import Pending, Plan
from gateway.planner import Planner
from gateway.policy import ConcurrencyTarget
from gateway.replicator import Replicator
from registry.change import FunctionChanged, FunctionDeleted, NodeUp
from registry.function import Function, FunctionVersion, Scaling
from registry.node import Holding, NodeRecord, Tier

WALL = 10_000.0


class World:
    """A directory, and a replicator whose actions are carried out at once."""

    def __init__(self) -> None:
        self.directory = Directory()
        self.planner = Planner(ConcurrencyTarget(), str)
        self.replicator = Replicator(self.planner)
        self.now = 0.0

    def node(self, id_: str, *holdings: Holding, **changes: object) -> NodeRecord:
        used = sum(h.bytes for h in holdings)
        known = self.directory.node(id_)
        limit = known.record.host_bytes if known else changes.pop("host_bytes", 2 * MIB)
        record = make_node(
            id_, holdings=holdings, host_bytes=limit, host_free_bytes=max(0, limit - used), **changes
        )
        self.directory.apply(NodeUp(record=record, ttl_s=60.0), self.now)
        self.directory.reach(id_, record.epoch)
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
        self.directory.apply(FunctionChanged(function=head, version=made), self.now)
        return made

    def plan(self, *starts: StartOn) -> Plan:
        plan = Plan(actions=list(starts))
        for start in starts:
            self.planner.pending[start.instance_id] = Pending(
                key=VersionKey(start.version.function, start.version.version),
                node=start.node,
                image=start.version.image,
            )
        self.replicator.plan(self.directory, plan, self.now, WALL + self.now)
        return plan

    def carry_out(self, plan: Plan) -> None:
        for action in plan.actions:
            if isinstance(action, WarmOn):
                self.planner.warmed(action.version.image or "", action.node)
                self.change(action.node, action.version.image or "", kept=action.keep, bytes=MIB)
            elif isinstance(action, UnkeepOn):
                self.change(action.node, action.image, kept=False)

    def change(self, node: str, image: str, **changes: object) -> None:
        entry = self.directory.node(node)
        assert entry is not None
        held = {holding.image: holding for holding in entry.record.holdings}
        fresh = Holding(image=image, tiers=(Tier.HOST,), bytes=MIB, last_used_at=WALL)
        held[image] = replace(held.get(image, fresh), **changes)  # type: ignore[arg-type]
        self.node(node, *held.values(), host=entry.record.host)

    def settle(self) -> list[object]:
        """Plan and carry out until nothing is left to do; returns all actions."""
        done: list[object] = []
        for _ in range(10):
            plan = self.plan()
            if not plan.actions:
                return done
            done += plan.actions
            self.carry_out(plan)
        raise AssertionError(f"no end: {done}")

    def keepers(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for node in self.directory.usable_nodes():
            for holding in node.holdings:
                if holding.kept:
                    found.setdefault(holding.image, []).append(node.id)
        return found


def held(image: str, *, kept: bool = False, used: float = WALL) -> Holding:
    return replace(make_holding(image, Tier.HOST, last_used_at=used), kept=kept)


def start(name: str, version: FunctionVersion, node: str) -> StartOn:
    return StartOn(instance_id=name, version=version, node=node, holders=(), max_concurrency=1)


def test_a_holder_becomes_the_keeper_and_no_byte_moves() -> None:
    world = World()
    world.deploy("f", "a")
    world.node("n0")
    world.node("n1", held("a"))
    assert [(type(a), a.node, a.keep) for a in world.plan().actions] == [(WarmOn, "n1", True)]
    assert world.plan().actions == []  # it is asked for once
    world.planner.warmed(digest("a"), "n1")
    assert world.settle() and world.keepers() == {digest("a"): ["n1"]}
    assert world.settle() == []


def test_keepers_are_spread_by_bytes() -> None:
    world = World()
    for name in "abcdef":
        world.deploy(name, name)
    for node in ("n0", "n1", "n2"):
        world.node(node, host_bytes=8 * MIB)
    world.settle()
    counts = [len([h for h in n.holdings if h.kept]) for n in world.directory.usable_nodes()]
    assert counts == [2, 2, 2]
    assert all(len(nodes) == 1 for nodes in world.keepers().values()) and len(world.keepers()) == 6


def test_a_dead_keeper_is_replaced_by_a_holder_and_yields_when_it_is_back() -> None:
    world = World()
    world.deploy("f", "a")
    world.node("n0", held("a", kept=True))
    world.node("n1", held("a"))
    assert world.settle() == []
    world.directory.suspect("n0")
    world.settle()
    assert world.keepers() == {digest("a"): ["n1"]}
    world.directory.reach("n0", 1)
    world.settle()
    assert [len(nodes) for nodes in world.keepers().values()] == [1]


def test_what_is_no_longer_deployed_is_not_kept() -> None:
    world = World()
    world.deploy("f", "old")
    world.deploy("g", "gone")
    world.node("n0", held("old", kept=True), held("gone", kept=True))
    world.deploy("f", "new", version=2)
    world.node("n1", held("new", kept=True))
    assert is_outdated(world.directory, digest("old")) and not is_outdated(world.directory, digest("new"))
    assert world.settle() == [UnkeepOn(image=digest("old"), node="n0")]
    world.directory.apply(FunctionDeleted(name="g"), 0.0)
    plan = world.plan()
    assert plan.actions == [] and plan.next_at == 30.0  # it might have been a deploy under way
    world.now = 30.0
    assert world.settle() == [UnkeepOn(image=digest("gone"), node="n0")]


def test_a_copy_that_a_deploy_has_just_made_stays_kept() -> None:
    world = World()
    world.node("n0", held("a", kept=True))
    assert world.settle() == []
    world.deploy("f", "a")
    world.now = 100.0
    assert world.settle() == []


def test_the_kept_copy_is_never_surplus() -> None:
    world = World()
    world.deploy("f", "a")
    world.node("n0", held("a", kept=True, used=1.0))
    world.node("n1", held("a", used=2.0))
    assert world.plan().actions == [DropFrom(image=digest("a"), node="n1", tier=Tier.HOST)]


def test_a_start_waits_until_others_keep_what_it_would_push_out() -> None:
    world = World()
    world.deploy("f", "a")
    world.deploy("g", "b")
    version = world.deploy("h", "c")
    world.node("n0", held("a", kept=True, used=WALL - 2), held("b", kept=True, used=WALL - 1))
    world.node("n1", held("c", kept=True))
    plan = world.plan(start("i", version, "n0"))
    (move,) = plan.actions
    assert isinstance(move, WarmOn) and move.version.image == digest("a") and move.keep
    assert (move.node, [h.node for h in move.holders]) == ("n1", ["n0"])
    assert world.planner.pending == {}  # it will be placed anew
    world.carry_out(plan)
    plan = world.plan(start("i", version, "n0"))
    assert plan.actions == [UnkeepOn(image=digest("a"), node="n0")]
    world.carry_out(plan)
    again = start("i", version, "n0")
    assert world.plan(again).actions == [again]
    assert world.keepers() == {digest("a"): ["n1"], digest("b"): ["n0"], digest("c"): ["n1"]}


def test_a_start_does_not_wait_where_nobody_can_take_over_or_for_too_long() -> None:
    world = World()
    world.deploy("f", "a")
    version = world.deploy("h", "c")
    world.node("n0", held("a", kept=True), host_bytes=MIB)
    world.node("n1", held("c", kept=True), host_bytes=MIB)
    only = start("i", version, "n0")
    assert only in world.plan(only).actions
    world.node("n2", host_bytes=MIB)
    assert only not in world.plan(only).actions
    world.now = 10.0
    assert only in world.plan(only).actions


def test_kept_copies_move_to_hosts_that_join_later() -> None:
    world = World()
    for name in "abcd":
        world.deploy(name, name)
    world.node("n0", *(held(name, kept=True) for name in "abcd"), host_bytes=8 * MIB)
    assert world.settle() == []
    world.node("n1", host_bytes=8 * MIB)
    world.settle()
    assert sorted(len(nodes) for nodes in world.keepers().values()) == [1, 1, 1, 1]
    assert sum(nodes == ["n1"] for nodes in world.keepers().values()) == 2
