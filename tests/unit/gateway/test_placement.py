"""Where instances start and stop, and who gives the bytes: pure decisions."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from gateway.cluster.node_space import arena_room
from gateway.planning.image_sources import ImageHolders, choose_sources, choose_warm
from gateway.planning.placement import (
    StartCandidate,
    can_run,
    choose_starts,
    choose_stops,
    start_candidates,
    unschedulable_reason,
)
from registry.records.engine import EngineKind
from registry.records.function import FunctionTask, FunctionVersion
from registry.records.instance import InstanceState
from registry.records.node import NodeRecord, Tier
from tests.fixtures.control import MIB, digest, make_holding, make_instance, make_node, make_version

IMAGE = digest("image-1")


def places(*nodes: NodeRecord, loading: tuple[str, ...] = ()) -> list[StartCandidate]:
    return start_candidates(
        make_version(), nodes, used_images={}, reserved_bytes={}, instances={}, loading_hosts=loading
    )


def test_the_nearest_tier_is_first() -> None:
    nodes = [
        make_node("none"),
        make_node("disk", holdings=(make_holding("image-1", Tier.DISK),)),
        make_node("loading"),
        make_node("mate", host="shared"),
        make_node("host", host="shared", holdings=(make_holding("image-1", Tier.HOST),)),
        make_node("gpu", holdings=(make_holding("image-1", Tier.GPU, Tier.HOST),)),
    ]
    chosen = choose_starts(6, places(*nodes, loading=("host-loading",)))
    assert [site.id for site in chosen] == ["gpu", "host", "mate", "loading", "disk", "none"]


def test_starts_spread_over_hosts_and_skip_full_nodes() -> None:
    nodes = [
        make_node("a0", host="a"),
        make_node("a1", host="a"),
        make_node("b0", host="b"),
        make_node("full", host="c", gpu_free_bytes=10),
    ]
    assert {site.host for site in choose_starts(2, places(*nodes))} == {"a", "b"}
    assert len(choose_starts(9, places(*nodes))) == 3


def divided(count: int, **changes: object) -> FunctionVersion:
    args = ("--tensor-parallel-size", str(count)) if count > 1 else ()
    return replace(make_version(), engine=EngineKind.VLLM, engine_args=args, **changes)  # type: ignore[arg-type]


def gpu_node(count: int, first: int = 0, **changes: object) -> NodeRecord:
    device = "cuda:" + ",".join(map(str, range(first, first + count)))
    engines = (EngineKind.NATIVE, EngineKind.VLLM)
    name = f"{count}-gpus-{first}"
    return make_node(name, device=device, gpu_count=count, engines=engines, host="h", **changes)


def test_an_instance_has_as_many_gpus_as_it_computes_with() -> None:
    nodes = [gpu_node(1), gpu_node(2, 1), gpu_node(4, 3), make_node("cpu", engines=tuple(EngineKind))]

    def able(version: FunctionVersion) -> set[str]:
        found = start_candidates(
            version, nodes, used_images={}, reserved_bytes={}, instances={}, loading_hosts=()
        )
        assert {site.id for site in found} == {node.id for node in nodes if can_run(version, node)}
        return {site.id for site in found}

    assert able(make_version()) == able(divided(1)) == {"1-gpus-0", "cpu"}
    assert able(divided(2)) == {"2-gpus-1", "cpu"}
    assert able(divided(4)) == {"4-gpus-3", "cpu"}
    assert able(divided(8)) == {"cpu"}, "any CPU runs any number of processes"


def test_why_no_node_has_the_gpus_is_said() -> None:
    one, two = gpu_node(1), gpu_node(2, 1)
    assert unschedulable_reason(divided(2), [one, two]) == ""
    reason = unschedulable_reason(divided(4), [one, two])
    assert "among 4 GPUs, and no node has exactly 4" in reason and "--device cuda:0,1,2,3" in reason
    assert "computes with one GPU" in unschedulable_reason(make_version(), [two])


def test_a_model_that_only_another_engine_runs_takes_nothing_of_the_arena() -> None:
    node = gpu_node(2, gpu_bytes=MIB, gpu_free_bytes=0)
    for native_first, fits in ((False, True), (True, False)):
        version = divided(2, image_bytes=9 * MIB, native_first=native_first)
        found = start_candidates(
            version, [node], used_images={}, reserved_bytes={}, instances={}, loading_hosts=()
        )
        assert bool(choose_starts(1, found)) is fits
        assert (unschedulable_reason(version, [node]) == "") is fits


def test_idle_images_give_up_their_room() -> None:
    other = make_holding("other", Tier.GPU, nbytes=60 * MIB)
    node = make_node("a", gpu_free_bytes=4 * MIB, holdings=(other,))
    args = {"reserved_bytes": {}, "instances": {}, "loading_hosts": ()}
    version = make_version(nbytes=50 * MIB)
    idle = start_candidates(version, [node], used_images={}, **args)
    used = start_candidates(version, [node], used_images={"a": {digest("other")}}, **args)
    assert len(choose_starts(1, idle)) == 1
    assert choose_starts(1, used) == []


def test_of_equal_nodes_that_starts_whose_idle_images_were_used_longest_ago() -> None:
    used = [
        replace(make_holding("other", Tier.GPU, nbytes=MIB), last_used_at=at) for at in (30.0, 10.0, 20.0)
    ]
    nodes = [
        make_node(name, gpu_free_bytes=63 * MIB, gpu_bytes=64 * MIB, holdings=(one,))
        for name, one in zip("abc", used, strict=True)
    ]
    nodes.append(make_node("d", gpu_free_bytes=64 * MIB, gpu_bytes=64 * MIB))
    assert [site.id for site in choose_starts(4, places(*nodes))] == ["d", "b", "c", "a"]


def test_a_start_shares_its_idle_image_and_has_the_rest() -> None:
    idle = make_holding("image-1", Tier.GPU, nbytes=20 * MIB)
    node = make_node("a", gpu_free_bytes=40 * MIB, gpu_bytes=64 * MIB, holdings=(idle,))
    for ranges, room in (((30, 60), 40), ((30, 30), 30), ((10, 60), 40), ((0, 25), 5)):
        largest_free, largest_room = (each * MIB for each in ranges)
        known = replace(node, gpu_largest_free_bytes=largest_free, gpu_largest_room_bytes=largest_room)
        assert arena_room(known, digest("image-1"), ()) == room * MIB


def test_an_image_needs_its_room_in_one_piece() -> None:
    idle = make_holding("other", Tier.GPU, nbytes=20 * MIB)
    node = make_node("a", gpu_free_bytes=60 * MIB, gpu_largest_room_bytes=50 * MIB, holdings=(idle,))
    for nbytes, fits in ((40, True), (50, True), (52, False)):
        found = start_candidates(
            make_version(nbytes=nbytes * MIB),
            [node],
            used_images={},
            reserved_bytes={},
            instances={},
            loading_hosts=(),
        )
        assert bool(choose_starts(1, found)) is fits


def test_handlers_start_only_where_they_are_allowed() -> None:
    version = make_version(image=None, task=FunctionTask.HANDLER)
    nodes = [make_node("no", allows_handlers=False), make_node("yes")]
    found = start_candidates(
        version, nodes, used_images={}, reserved_bytes={}, instances={}, loading_hosts=()
    )
    assert [site.id for site in found] == ["yes"]
    assert "not allowed" in unschedulable_reason(version, nodes[:1])
    assert unschedulable_reason(version, nodes) == ""


def test_idle_instances_stop_before_busy_ones_and_pinned_ones_last() -> None:
    ready = [make_instance("busy", "a"), make_instance("idle", "b"), make_instance("pinned", "c")]
    coming = [make_instance("coming", "d", state=InstanceState.LOADING)]
    stops = choose_stops(3, ready, coming, in_flight={"busy": 2}, keep_on=["c"])
    assert [i.instance_id for i in stops] == ["coming", "idle", "busy"]


def test_exactly_one_node_reads_the_store_when_nobody_holds_the_image() -> None:
    nodes = [make_node("a", reads_store=False), make_node("b"), make_node("c")]
    sources = choose_sources(IMAGE, nodes, nodes, [])
    assert sources.loader == "b"
    assert {node: [h.node for h in holders] for node, holders in sources.holders.items()} == {
        "a": ["b"],
        "b": [],
        "c": ["b"],
    }


def test_a_node_with_a_disk_copy_loads_before_one_that_reads_the_store() -> None:
    nodes = [
        make_node("a"),
        make_node("b", reads_store=False, holdings=(make_holding("image-1", Tier.DISK),)),
    ]
    assert choose_sources(IMAGE, nodes, nodes, []).loader == "b"


def test_a_loading_node_is_everyones_holder_and_nobody_else_loads() -> None:
    nodes = [make_node("a"), make_node("b"), make_node("c")]
    sources = choose_sources(IMAGE, nodes[1:], nodes, nodes[:1])
    assert sources.loader is None
    assert [h.node for holders in sources.holders.values() for h in holders] == ["a", "a"]


def test_without_a_reader_among_the_targets_another_node_loads_for_them() -> None:
    nodes = [make_node("a", reads_store=False), make_node("b")]
    sources = choose_sources(IMAGE, nodes[:1], nodes, [])
    assert (sources.loader, [h.node for h in sources.holders["a"]]) == ("b", ["b"])
    assert "none can read" in choose_sources(IMAGE, nodes[:1], nodes[:1], []).error


def test_holders_on_the_targets_host_come_first_and_memory_before_the_accelerator() -> None:
    target = make_node("t", host="h1")
    nodes = [
        target,
        make_node("gpu", holdings=(make_holding("image-1", Tier.GPU),)),
        make_node("far", holdings=(make_holding("image-1", Tier.HOST, Tier.GPU),)),
        make_node("near", host="h1", holdings=(make_holding("image-1", Tier.HOST),)),
    ]
    holders = ImageHolders(IMAGE, nodes, [make_node("late")]).for_target(target)
    assert [(h.node, h.tier) for h in holders] == [
        ("near", "host"),
        ("far", "host"),
        ("gpu", "gpu"),
        ("late", "host"),
    ]


def test_warm_copies_go_to_different_hosts_with_room() -> None:
    nodes = [
        make_node("a0", host="a"),
        make_node("a1", host="a"),
        make_node("full", host="f", host_free_bytes=0),
        make_node("small", host="s", host_bytes=10, host_free_bytes=10),
        make_node("b", host="b"),
    ]
    assert {n.host for n in choose_warm(IMAGE, MIB, 2, nodes)} == {"a", "b"}
    assert {n.host for n in choose_warm(IMAGE, MIB, 9, nodes)} == {"a", "b", "f"}
    assert choose_warm(IMAGE, MIB, 2, nodes) == choose_warm(IMAGE, MIB, 2, nodes[::-1])


node_lists = st.lists(
    st.builds(
        lambda host, tiers, reads, free: replace(
            make_node("x", host=host, reads_store=reads, gpu_free_bytes=free),
            holdings=(make_holding("image-1", *tiers),) if tiers else (),
        ),
        host=st.sampled_from("abc"),
        tiers=st.sets(st.sampled_from([Tier.GPU, Tier.HOST, Tier.DISK])),
        reads=st.booleans(),
        free=st.sampled_from([0, MIB, 10 * MIB]),
    ),
    max_size=8,
).map(lambda nodes: [replace(node, id=f"n{i}") for i, node in enumerate(nodes)])


@given(node_lists, st.integers(0, 9))
def test_placement_is_within_bounds_and_everyone_has_a_source(nodes: list[NodeRecord], count: int) -> None:
    chosen = choose_starts(count, places(*nodes))
    ids = [site.id for site in chosen]
    assert len(ids) == len(set(ids)) <= count
    by_id = {node.id: node for node in nodes}
    targets = [by_id[id_] for id_ in ids]
    sources = choose_sources(IMAGE, targets, nodes, [])
    held = any(t in (Tier.GPU, Tier.HOST) for n in nodes for h in n.holdings for t in h.tiers)
    if sources.error:
        assert not held
        return
    assert (sources.loader is None) == (held or not nodes) or not targets
    for target in targets:
        holders = [h.node for h in sources.holders[target.id]]
        assert target.id not in holders
        alone = target.id == sources.loader or any(
            t in (Tier.GPU, Tier.HOST) for h in target.holdings for t in h.tiers
        )
        assert holders or alone
