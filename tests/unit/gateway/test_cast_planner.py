"""Which starts become one cast, from whom, and who joins one that runs: pure decisions."""

import asyncio
from dataclasses import replace
from itertools import count

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.cluster.link_estimates import estimate_links
from gateway.cluster.link_rates import LinkRateCache
from gateway.cluster.state_cache import ClusterStateCache
from gateway.planning.actions import PrefetchAction, StartAction
from gateway.planning.cast_planner import (
    CastPlanner,
    ImageDelivery,
    choose,
    new_cast,
)
from gateway.planning.cast_publisher import CastPublisher
from gateway.planning.image_sources import choose_sources
from gateway.planning.plan import Plan
from rdmacast.cast.record import CastPlan
from rdmacast.cast.spec import CastSpec
from rdmacast.plan.planners.catalog import PLANNERS
from rdmacast.plan.planners.own_part import own_part
from rdmacast.protocol.pull_report import MAX_SLOW
from registry.errors import RemoteError, StateUnavailable
from registry.images.manifest import MAX_BLOCKS, MIN_BLOCKS, UNIT_BYTES, block_bytes
from registry.memory.state import MemoryState
from registry.messages.images import MAX_CAST_MEMBERS, ImageHolder
from registry.records.cast import CastRecord, CastState
from registry.records.change import CastChanged, CastPartEnded, NodeUp
from registry.records.node import NodeRecord, Tier
from tests.fixtures.control import MIB, make_holding, make_node, make_version
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.registry_records import cast_progress

VERSION = make_version("f", image="image", nbytes=64 * MIB)
IMAGE = VERSION.image or ""


class World:
    """A state cache, and the casts of one gateway; `arriving` names nodes to which the image is coming."""

    def __init__(self, *others: str, **holders: Tier) -> None:
        self.state_cache = ClusterStateCache()
        numbers = count()
        self.casts = CastPlanner(lambda: f"c{next(numbers)}")
        self.arriving: list[str] = []
        for id_, tier in holders.items():
            self.node(id_, tier)
        for id_ in others:
            self.node(id_)

    def node(self, id_: str, *tiers: Tier, host: str = "", **changes: object) -> None:
        holdings = (make_holding("image", *tiers, nbytes=64 * MIB),) if tiers else ()
        record = make_node(id_, holdings=holdings, host=host or f"host-{id_}", **changes)
        self.state_cache.apply(NodeUp(record=record, ttl_s=60.0), 0.0)
        self.state_cache.channel_up(id_, record.epoch)

    def record(self, id_: str) -> NodeRecord:
        entry = self.state_cache.node(id_)
        assert entry is not None
        return entry.record

    def loading(self, state_cache: ClusterStateCache, image: str) -> list[NodeRecord]:
        return [self.record(id_) for id_ in self.arriving]

    def deliver(self, *targets: str) -> ImageDelivery:
        nodes = list(self.state_cache.usable_nodes())
        loading = self.loading(self.state_cache, IMAGE)
        found = choose_sources(IMAGE, [self.record(id_) for id_ in targets], nodes, loading)
        holders = {id_: found.holders.get(id_, ()) for id_ in targets}
        return self.casts.deliver(self.state_cache, VERSION, holders, self.loading, 100.0)


def cast_of(delivery: ImageDelivery) -> CastRecord:
    assert delivery.cast is not None
    return delivery.cast


def names(cast: CastRecord) -> tuple[list[str], list[str]]:
    """Return sources and targets."""
    return [cast.members[index].node for index in cast.sources], [member.node for member in cast.targets]


def test_all_who_start_at_once_are_one_cast_from_all_holders() -> None:
    world = World("t0", "t1", "t2", a=Tier.HOST, b=Tier.GPU)
    delivery = world.deliver("t0", "t1", "t2")
    cast = cast_of(delivery)
    assert names(cast) == (["a", "b"], ["t0", "t1", "t2"])
    assert [member.tier for member in cast.members[:2]] == [Tier.HOST, Tier.GPU]
    assert (cast.planned, cast.epoch, cast.nbytes, cast.started_at) == (5, 0, 64 * MIB, 100.0)
    assert cast.planner in cast.reason and cast.block_bytes % UNIT_BYTES == 0
    assert all(delivery.cast_for(id_) is cast for id_ in ("t0", "t1", "t2"))
    assert delivery.cast_for("a") is None


def test_gpus_that_alone_have_an_image_are_sources_of_its_cast() -> None:
    world = World()
    world.node("a", Tier.GPU, device="cuda:0")
    world.node("b", Tier.GPU, device="cuda:0")
    world.node("t0")
    world.node("t1")
    cast = cast_of(world.deliver("t0", "t1"))
    assert names(cast) == (["a", "b"], ["t0", "t1"])
    assert [member.tier for member in cast.members[:2]] == [Tier.GPU, Tier.GPU]


def test_a_host_is_one_member_and_its_host_memory_comes_before_its_accelerators() -> None:
    world = World()
    world.node("a0", Tier.GPU, host="A")
    world.node("a1", Tier.GPU, Tier.HOST, host="A")
    world.node("t0", host="T")
    world.node("t1", host="T")
    delivery = world.deliver("t0", "t1")
    assert names(cast_of(delivery)) == (["a1"], ["t0"])
    assert delivery.cast_for("t1") is None
    assert [holder.node for holder in delivery.holders_for("t1", ())] == ["t0"]
    assert delivery.holders_for("t0", ()) == ()


def test_who_has_it_on_its_host_or_accelerator_needs_no_cast() -> None:
    world = World()
    world.node("a0", Tier.HOST, host="A")
    world.node("a1", host="A")
    world.node("g", Tier.GPU)
    delivery = world.deliver("a1", "g")
    assert delivery.cast is None and not delivery.behind


def test_where_nobody_has_it_the_one_that_reads_the_store_is_the_source() -> None:
    world = World()
    world.node("t0", reads_store=False)
    world.node("t1")
    world.node("t2", host="host-t1")
    delivery = world.deliver("t0", "t1", "t2")
    assert names(cast_of(delivery)) == (["t1"], ["t0"])
    assert delivery.cast_for("t1") is None
    assert [holder.node for holder in delivery.holders_for("t2", ())] == ["t1"]
    assert world.casts.deliver(world.state_cache, VERSION, {"t1": ()}, world.loading, 1.0).cast is None


def test_a_late_start_joins_the_cast_that_runs() -> None:
    world = World("t0", "t1", "late", a=Tier.HOST)
    first = cast_of(world.deliver("t0", "t1"))
    world.arriving = ["t0", "t1"]
    world.state_cache.apply(CastChanged(record=first), 0.0)
    joined = cast_of(world.deliver("late"))
    assert (joined.cast_id, joined.epoch, joined.planned) == (first.cast_id, 1, first.planned)
    assert joined.members[:3] == first.members and joined.members[3].node == "late"
    assert [member.joined_at for member in joined.members] == [0.0, 0.0, 0.0, 100.0]
    # Before the feed has reported it, too.
    world.node("later")
    assert cast_of(world.deliver("later")).epoch == 2


def test_another_gateway_joins_what_the_feed_told_of() -> None:
    one, other = (World("t0", "late", a=Tier.HOST) for _ in range(2))
    cast = cast_of(one.deliver("t0"))
    other.arriving = ["t0"]
    other.state_cache.apply(CastChanged(record=cast), 0.0)
    assert cast_of(other.deliver("late")).epoch == 1


def test_nobody_joins_a_cast_that_has_ended_or_whose_sources_are_gone() -> None:
    world = World("t0", "t1", a=Tier.HOST)
    first = cast_of(world.deliver("t0"))
    assert cast_of(world.deliver("t1")).cast_id != first.cast_id  # nobody is loading any more
    world = World("t0", "t1", a=Tier.HOST)
    first = cast_of(world.deliver("t0"))
    world.node("a")
    world.arriving = ["t0"]
    second = cast_of(world.deliver("t1"))
    assert second.cast_id != first.cast_id and names(second) == (["t0"], ["t1"])


def test_a_member_that_starts_again_joins_by_its_new_address() -> None:
    world = World("t0", "t1", a=Tier.HOST)
    first = cast_of(world.deliver("t0", "t1"))
    world.arriving = ["t1"]
    world.node("t0", cast="tcp://elsewhere:1")
    again = cast_of(world.deliver("t0"))
    assert (again.epoch, len(again.members)) == (1, 3)
    assert {member.node: member.address for member in again.members}["t0"] == "tcp://elsewhere:1"
    assert again.planned == first.planned


def test_starts_and_warms_of_a_step_are_given_their_cast() -> None:
    world = World("t0", "t1", a=Tier.HOST)
    holder = choose_sources(IMAGE, [world.record("t0")], list(world.state_cache.usable_nodes()), []).holders[
        "t0"
    ]
    other = make_version("g", image=None)
    plan = Plan(
        actions=[
            StartAction(instance_id="i0", version=VERSION, node="t0", holders=holder, max_concurrency=1),
            StartAction(instance_id="i1", version=other, node="t0", holders=(), max_concurrency=1),
            PrefetchAction(version=VERSION, node="t1", holders=holder),
        ]
    )
    world.casts.plan(world.state_cache, plan, world.loading, 1.0)
    start, handler, warm = plan.actions
    assert (
        isinstance(start, StartAction)
        and isinstance(handler, StartAction)
        and isinstance(warm, PrefetchAction)
    )
    assert start.cast is warm.cast is not None and handler.cast is None
    assert start.cast.members[0].address == "tcp://a:2"


def test_nodes_of_different_rates_are_ordered_chains_with_the_fastest_first() -> None:
    world = World()
    world.node("a", Tier.HOST, link_rate_bytes_s=10**9)
    for id_, rate in (("slow", 10**7), ("fast", 10**9), ("middle", 10**8)):
        world.node(id_, link_rate_bytes_s=rate)
    cast = cast_of(world.deliver("slow", "fast", "middle"))
    assert (cast.planner, names(cast)[1]) == ("multi-chain", ["fast", "middle", "slow"])


def test_one_slow_node_among_many_is_left_at_the_edge() -> None:
    world = World()
    world.node("a", Tier.HOST, link_rate_bytes_s=10**9)
    targets = ["b", "slow", "c", "d"]
    for id_ in targets:
        world.node(id_, link_rate_bytes_s=10**8 if id_ == "slow" else 10**9)
    cast = cast_of(world.deliver(*targets))
    assert (cast.edge, cast.members[4].node) == ((4,), "slow") and cast.planner != "multi-chain"
    assert cast.edge == (4,) and "1 of 5 nodes are slow" in cast.reason


@given(st.integers(1, 1 << 38), st.integers(2, 40), st.integers(1, 39))
def test_blocks_are_whole_units_neither_too_fine_nor_too_coarse(
    nbytes: int, nodes: int, sources: int
) -> None:
    members = [make_node(f"n{number}") for number in range(nodes)]
    decision = choose(members, min(sources, nodes - 1), nbytes, estimate_links(members, LinkRateCache()))
    size = block_bytes(nbytes, decision.blocks)
    blocks, units = -(-nbytes // size), -(-nbytes // UNIT_BYTES)
    assert size % UNIT_BYTES == 0 and blocks == decision.blocks <= MAX_BLOCKS
    assert blocks >= min(units, MIN_BLOCKS) // 2


async def test_each_cast_is_published_once_and_no_node_that_did_not_begin_is_waited_for() -> None:
    world, state = World("t0", "t1", a=Tier.HOST), MemoryState()
    cast, records = cast_of(world.deliver("t0", "t1")), CastPublisher(state)

    async def call(node: str) -> None:
        async with records.joining(cast, node):
            assert [status.record for status in await state.casts()] == [cast]
            if node == "t1":
                raise RemoteError("out_of_memory", "no room")

    await call("t0")
    with pytest.raises(RemoteError):
        await call("t1")
    (status,) = await state.casts()
    assert [(one.node, one.state, one.error) for one in status.progress] == [
        ("t1", CastState.FAILED, "no room")
    ]
    async with records.joining(None, "t0"):
        pass


async def test_a_start_does_not_wait_for_a_state_that_is_away() -> None:
    class Away(MemoryState):
        async def put_cast(self, record: CastRecord) -> None:
            raise StateUnavailable("away")

    world = World("t0", a=Tier.HOST)
    records = CastPublisher(Away())
    async with records.joining(cast_of(world.deliver("t0")), "t0"):
        pass


async def test_a_cast_whose_first_start_is_given_up_is_published_by_the_next() -> None:
    class Slow(MemoryState):
        asked = asyncio.Event()

        async def put_cast(self, record: CastRecord) -> None:
            if not self.asked.is_set():
                self.asked.set()
                await asyncio.Event().wait()
            await super().put_cast(record)

    world, state = World("t0", "t1", a=Tier.HOST), Slow()
    cast, records = cast_of(world.deliver("t0", "t1")), CastPublisher(state, PATIENCE_S)
    first = asyncio.create_task(records.publish(cast))
    await state.asked.wait()
    others = [asyncio.create_task(records.publish(cast)) for _ in range(2)]
    await asyncio.sleep(0)  # they wait for the first
    first.cancel()
    await asyncio.gather(*others)
    assert first.cancelled() and [status.record for status in await state.casts()] == [cast]


def test_few_of_the_casts_of_a_gateway_that_plans_no_steps_are_remembered() -> None:
    world = World()
    for number in range(300):
        image = f"image-{number}"
        holdings = (make_holding(image, Tier.HOST, nbytes=64 * MIB),)
        for id_ in ("a", "t"):
            record = make_node(id_, holdings=holdings if id_ == "a" else (), host=id_)
            world.state_cache.apply(NodeUp(record=record, ttl_s=60.0), 0.0)
            world.state_cache.channel_up(id_, record.epoch)
        version = make_version("f", image=image, nbytes=64 * MIB)
        assert world.casts.deliver(world.state_cache, version, {"t": ()}, world.loading, 1.0).cast is not None
    assert repr(world.casts).count("CastRecord(") == 256


@pytest.mark.parametrize("published", [True, False])
def test_one_more_start_on_a_node_that_takes_part_already_is_no_cast(published: bool) -> None:
    world = World("reader", "t0", "new")
    cast = cast_of(world.deliver("reader", "t0"))
    if published:
        world.state_cache.apply(CastChanged(record=cast), 0.0)
    world.arriving = ["reader", "t0"]
    for again in ("reader", "t0"):
        delivery = world.deliver(again)
        assert (delivery.cast, delivery.behind) == (None, {})
    joined = cast_of(world.deliver("t0", "new"))
    assert (joined.cast_id, joined.epoch, names(joined)[1]) == (cast.cast_id, 1, ["t0", "new"])
    for target in ("t0", "new"):
        failed = cast_progress(target, cast_id=cast.cast_id, state=CastState.FAILED)
        for change in (CastChanged(record=joined), CastPartEnded(progress=failed)):
            world.state_cache.apply(change, 0.0)
    world.arriving = ["reader"]
    assert cast_of(world.deliver("t0")).cast_id != cast.cast_id  # that one is over


def test_of_more_hosts_than_a_cast_may_have_some_ask_the_holders() -> None:
    world = World(source=Tier.HOST)
    targets = [f"t{number}" for number in range(MAX_CAST_MEMBERS + 5)]
    for id_ in targets:
        world.node(id_)
    source = world.record("source")
    holder = ImageHolder(node=source.id, host=source.host, cast=source.cast, tier="host")
    asked = dict.fromkeys(targets, (holder,))
    delivery = world.casts.deliver(world.state_cache, VERSION, asked, world.loading, 100.0)
    cast = cast_of(delivery)
    assert len(cast.members) == MAX_CAST_MEMBERS and len(delivery.members) == MAX_CAST_MEMBERS - 1
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(cast), type=CastPlan)
    assert sent.members == cast.members


def test_the_plan_is_one_that_nodes_can_make_from_what_they_are_told() -> None:
    rates = (1e8, 1e8, 4e8, 3e8, 2e8, 1e8)
    nodes = [make_node(f"n{number}", link_rate_bytes_s=rate) for number, rate in enumerate(rates)]
    decision = choose(nodes, 2, 64 * MIB, estimate_links(nodes, LinkRateCache()))
    assert decision.planner == "multi-chain" and "links as capped" in decision.reason
    plan = decision.plan(6, (0, 1))
    for node in range(2, 6):
        received = plan.receives(node)
        made = tuple(zip(received.source.tolist(), received.block.tolist(), strict=True))
        assert made == own_part(decision.planner, plan.shape, node)


def test_nodes_make_the_plan_along_leaf_switches_and_domains() -> None:
    places = [("a", ""), ("b", "x"), ("b", "x"), ("a", ""), ("b", ""), ("c", "")]
    nodes = [
        make_node(f"n{number}", leaf=leaf, domain=domain) for number, (leaf, domain) in enumerate(places)
    ]
    decision = choose(nodes, 1, 64 * MIB, estimate_links(nodes, LinkRateCache()))
    assert decision.planner == "multi-chain" and "2 copies between 3 leaf switches" in decision.reason
    world = World()
    for node in nodes[1:]:
        world.node(node.id, leaf=node.leaf, domain=node.domain)
    world.node("n0", Tier.HOST, leaf="a")
    cast = cast_of(world.deliver(*(node.id for node in nodes[1:])))
    assert [(one.leaf, one.domain) for one in cast.members][:1] == [("a", "")]
    spec = CastSpec(plan=cast)
    plan = PLANNERS[cast.planner].plan(spec.shape)
    plan.validate()
    leaves = [member.leaf for member in cast.members]
    crossing = 0
    for node in range(1, len(cast.members)):
        order = spec.order(node)
        assert order is not None and sorted(block for _, block in order) == list(range(cast.blocks))
        crossing += sum(leaves[source] != leaves[node] for source, _ in order)
    assert crossing == 2 * cast.blocks
    assert {cast.members[other].node for other in spec.near(leaves.index("b"))} == {"n2", "n4"}


def test_a_source_under_the_targets_leaf_comes_before_others() -> None:
    world = World()
    for id_, leaf in (("far", "a"), ("near", "b")):
        world.node(id_, Tier.HOST, leaf=leaf)
    world.node("t", leaf="b")
    assert names(cast_of(world.deliver("t"))) == (["near", "far"], ["t"])
    holders = choose_sources(IMAGE, [world.record("t")], list(world.state_cache.usable_nodes()), [])
    assert [holder.node for holder in holders.holders["t"]] == ["near", "far"]


def test_the_reason_says_what_is_only_assumed() -> None:
    known, unknown = make_node("a", link_rate_bytes_s=1e9), make_node("b", link_rate_bytes_s=None)
    for nodes, said in (
        ([unknown, replace(unknown, id="c")], "(links of 10 Gbit/s assumed)"),
        ([known, unknown], "(1 links as capped, 1 links of 10 Gbit/s assumed)"),
    ):
        assert choose(nodes, 1, MIB, estimate_links(nodes, LinkRateCache())).reason.endswith(said)


def test_nodes_are_told_what_links_carry_unless_all_of_it_is_assumed() -> None:
    known, unknown = make_node("a", link_rate_bytes_s=2e8), make_node("b", link_rate_bytes_s=None)
    version = make_version("f", image="image", nbytes=64 * MIB)

    def reported(nodes: list[NodeRecord], links: LinkRateCache) -> int:
        cast = new_cast(version, nodes[:1], nodes[1:], "c", 100.0, estimate_links(nodes, links))
        return cast.link_bytes_s

    assert reported([unknown, replace(unknown, id="c")], LinkRateCache()) == 0
    assert reported([unknown, replace(unknown, id="c")], LinkRateCache(3e8)) == 3e8
    assert reported([known, unknown], LinkRateCache()) == 2e8
    slow = make_node("slow", link_rate_bytes_s=1e7)
    nodes = [replace(known, id=f"n{number}") for number in range(7)]
    assert reported([*nodes, slow], LinkRateCache()) == 2e8  # it is at the edge


def test_no_more_are_at_the_edge_than_nodes_can_be_told_of() -> None:
    rates = [1e9] * 1500 + [1e8] * 300
    nodes = [make_node(f"n{number}", link_rate_bytes_s=rate) for number, rate in enumerate(rates)]
    assert len(choose(nodes, 1, 64 * MIB, estimate_links(nodes, LinkRateCache())).edge) <= MAX_SLOW
