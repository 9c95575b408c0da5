"""Which links serving uses, in which direction, and what that means for the sources of casts."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.cluster.link_estimates import estimate_links
from gateway.cluster.link_rates import LinkRateCache
from gateway.cluster.state_cache import ClusterStateCache
from gateway.planning.cast_planner import CastPlanner, new_cast
from gateway.planning.image_sources import choose_sources
from gateway.planning.serving_traffic import ServingTraffic, serving_traffic
from registry.records.cast import CastRecord
from registry.records.change import InstanceChanged, LiveChanged, NodeUp
from registry.records.instance import InstanceState
from registry.records.live import InstanceRole, LiveMode, LivePipeline, LiveRecord, LiveStage
from registry.records.node import NodeRecord, Tier
from tests.fixtures.control import MIB, make_holding, make_instance, make_node, make_version

VERSION = make_version("f", image="image", nbytes=64 * MIB)
IMAGE = VERSION.image or ""
PREFILL, DECODE = InstanceRole.PREFILL, InstanceRole.DECODE


def cluster(holders: str, others: str = "", **roles: InstanceRole) -> ClusterStateCache:
    """Return a cluster of nodes named by letters; `roles` are those of an instance on each node."""
    cache = ClusterStateCache()
    for name in holders + others:
        holdings = (make_holding("image", Tier.HOST, nbytes=64 * MIB),) if name in holders else ()
        record = make_node(name, holdings=holdings, host=f"host-{name}")
        cache.apply(NodeUp(record=record, ttl_s=60.0), 0.0)
        cache.channel_up(name, record.epoch)
    for name in roles:
        instance = make_instance(f"i-{name}", node=name, state=InstanceState.READY)
        cache.apply(InstanceChanged(record=instance), 0.0)
    serve(cache, roles={f"i-{name}": role for name, role in roles.items()})
    return cache


def serve(cache: ClusterStateCache, function: str = "g", **changes: object) -> None:
    record = LiveRecord(
        function=function,
        version=1,
        controller_epoch=1,
        serial=1,
        way=LiveMode.OFF,
        reason="",
        at=0.0,
        **changes,  # type: ignore[arg-type]
    )
    cache.apply(LiveChanged(record=record, ttl_s=60.0), 0.0)


def nodes(cache: ClusterStateCache, names: str) -> list[NodeRecord]:
    return [entry.record for name in names if (entry := cache.node(name)) is not None]


def cast(cache: ClusterStateCache, targets: str) -> CastRecord:
    found = choose_sources(IMAGE, nodes(cache, targets), list(cache.usable_nodes()), [])
    delivery = CastPlanner().deliver(cache, VERSION, found.holders, lambda *_: [], 100.0)
    assert delivery.cast is not None
    return delivery.cast


def sources(record: CastRecord) -> str:
    return "".join(record.members[source].node for source in record.sources)


def test_prefill_instances_send_and_decode_instances_receive() -> None:
    cache = cluster("ab", "c", a=PREFILL, b=DECODE)
    assert serving_traffic(cache) == ServingTraffic(senders=frozenset("a"), receivers=frozenset("b"))


def test_an_instance_that_is_gone_uses_no_link() -> None:
    cache = cluster("ab")
    serve(cache, function="h", roles={"gone": PREFILL})
    assert serving_traffic(cache) == ServingTraffic()


def test_each_stage_sends_to_the_next() -> None:
    cache = cluster("abc")
    stages = tuple(LiveStage(node=n, instance_id=n, first=i, last=i + 1) for i, n in enumerate("abc"))
    pipeline = LivePipeline(pipeline_id="p", epoch=1, stages=stages, head=2, rate=1.0, slots=1)
    serve(cache, function="h", pipelines=(pipeline,))
    found = serving_traffic(cache)
    assert (found.senders, found.receivers) == (frozenset("ab"), frozenset("bc"))


def test_nodes_that_send_k_and_v_are_no_sources_where_others_hold_the_image() -> None:
    record = cast(cluster("abc", "tuv", a=PREFILL, b=DECODE), "tuv")
    assert sources(record) == "bc"
    assert record.reason.endswith("; 1 more hold it, but send K and V")


def test_a_node_that_sends_k_and_v_is_the_source_where_no_other_holds_the_image() -> None:
    assert sources(cast(cluster("a", "btu", a=PREFILL, b=DECODE), "tu")) == "a"


def test_nodes_that_send_k_and_v_help_where_the_cast_takes_much_longer_without_them() -> None:
    """Of one block, each hop takes a whole copy: 16 nodes are 4 hops from one source, and one from eight."""
    small = make_version("f", image="image", nbytes=MIB // 4)
    cache = cluster("abcdefgh", "stuvwxyz", **dict.fromkeys("abcdefg", PREFILL))
    found = choose_sources(IMAGE, nodes(cache, "stuvwxyz"), list(cache.usable_nodes()), [])
    delivery = CastPlanner().deliver(cache, small, found.holders, lambda *_: [], 100.0)
    assert delivery.cast is not None
    assert sources(delivery.cast) == "habcdefg"  # the one that sends nothing else first
    assert "send K and V" not in delivery.cast.reason


def test_targets_whose_links_serving_uses_come_last() -> None:
    cache = cluster("a", "tuv", t=PREFILL, u=DECODE)
    record = cast(cache, "tuv")
    assert [member.node for member in record.targets] == ["v", "t", "u"]


def test_pulls_turn_to_nodes_that_send_k_and_v_last() -> None:
    cache = cluster("abc", "t", a=PREFILL)
    args = IMAGE, nodes(cache, "t"), list(cache.usable_nodes()), nodes(cache, "")
    holders = choose_sources(*args, serving_traffic(cache).senders).holders["t"]
    assert {one.node for one in holders} == set("abc")
    assert holders[-1].node == "a"


@given(st.sets(st.sampled_from("abcdef")), st.sets(st.sampled_from("tuvw"), min_size=1))
def test_a_cast_has_a_source_whoever_sends_and_no_sender_beside_its_targets_rate(
    busy: set[str], targets: set[str]
) -> None:
    cache = cluster("abcdef", "tuvw", **dict.fromkeys(sorted(busy), PREFILL))
    record = cast(cache, "".join(sorted(targets)))
    quiet = set("abcdef") - busy
    assert set(sources(record)) == (quiet or busy)
    assert {member.node for member in record.targets} == targets


def test_the_order_of_a_cast_without_traffic_is_that_of_rates() -> None:
    cache = cluster("a", "tu")
    links = LinkRateCache()
    members = nodes(cache, "atu")
    record = new_cast(VERSION, members[:1], members[1:], "c", 1.0, estimate_links(members, links))
    assert [member.node for member in record.members] == ["a", "t", "u"]
