"""Placement among many nodes: as good as trying everything, in work that grows as the nodes do."""

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.cluster.state_cache import ClusterStateCache
from gateway.planning.cast_planner import CastPlanner
from gateway.planning.image_sources import ImageHolders, choose_sources, choose_warm
from gateway.planning.placement import StartCandidate, choose_starts
from registry.records.change import NodeUp
from registry.records.node import NodeRecord, Tier
from tests.fixtures.call_counts import calls_made
from tests.fixtures.control import MIB, digest, make_holding, make_node, make_version

IMAGE = digest("image-1")
VERSION = make_version("f", image="image-1", nbytes=64 * MIB)
FEW, MANY = 250, 1000
MOST_HOLDERS = 8

places = st.lists(
    st.builds(
        StartCandidate,
        id=st.just(""),
        host=st.sampled_from("abcd"),
        rank=st.integers(0, 2),
        free_bytes=st.sampled_from([0, 5, 10]),
        instances=st.integers(0, 2),
        need_bytes=st.sampled_from([0, 5]),
        preferred_bytes=st.sampled_from([0, 10]),
        crowded=st.booleans(),
    ),
    max_size=24,
).map(lambda sites: [_named(site, f"n{number}") for number, site in enumerate(sites)])


def _named(site: StartCandidate, id_: str) -> StartCandidate:
    return StartCandidate(
        id=id_,
        host=site.host,
        rank=site.rank,
        free_bytes=site.free_bytes,
        instances=site.instances,
        need_bytes=site.need_bytes,
        preferred_bytes=site.preferred_bytes,
        crowded=site.crowded,
    )


def best_one_after_the_other(count: int, candidates: list[StartCandidate]) -> list[StartCandidate]:
    """Return what choose_starts promises, by looking at all that are left for each start."""
    left = [site for site in candidates if site.fits]
    chosen: list[StartCandidate] = []
    on_host: Counter[str] = Counter()
    while left and len(chosen) < count:
        best = min(
            left,
            key=lambda s: (s.rank, s.tight, s.crowded, on_host[s.host], s.instances, -s.free_bytes, s.id),
        )
        left.remove(best)
        chosen.append(best)
        on_host[best.host] += 1
    return chosen


@given(st.integers(0, 26), places)
def test_starts_are_those_that_looking_at_all_for_each_would_choose(
    count: int, candidates: list[StartCandidate]
) -> None:
    assert choose_starts(count, candidates) == best_one_after_the_other(count, candidates)


def nodes_of(count: int, *tiers: Tier, prefix: str = "n", a_host: int = 1) -> list[NodeRecord]:
    holdings = (make_holding("image-1", *tiers, nbytes=64 * MIB),) if tiers else ()
    return [
        make_node(f"{prefix}{number}", holdings=holdings, host=f"{prefix}-host-{number // a_host}")
        for number in range(count)
    ]


def sites_of(count: int, a_host: int) -> list[StartCandidate]:
    return [
        StartCandidate(
            id=f"n{number}", host=f"h{number // a_host}", rank=number % 3, free_bytes=number, instances=0
        )
        for number in range(count)
    ]


def sources_of(count: int, holders: int, a_host: int) -> None:
    held = nodes_of(holders, Tier.HOST, prefix="held", a_host=a_host)
    targets = nodes_of(count, a_host=a_host)
    assert len(choose_sources(IMAGE, targets, [*held, *targets], []).holders) == count


def nobody_loads(state_cache: ClusterStateCache, image: str) -> list[NodeRecord]:
    return []


def delivery_of(count: int, holders: int) -> None:
    state_cache = ClusterStateCache()
    targets = nodes_of(count, prefix="target")
    for record in (*nodes_of(holders, Tier.HOST, prefix="held"), *targets):
        state_cache.apply(NodeUp(record=record, ttl_s=60.0), 0.0)
        state_cache.channel_up(record.id, record.epoch)
    asked = {target.id: () for target in targets}
    delivery = CastPlanner().deliver(state_cache, VERSION, asked, nobody_loads, 1.0)
    assert delivery.cast is not None and len(delivery.cast.members) == count + holders


@pytest.mark.parametrize(
    "work",
    [
        pytest.param(lambda n: choose_starts(n, sites_of(n, 1)), id="starts"),
        pytest.param(lambda n: choose_starts(n, sites_of(n, n)), id="starts on one host"),
        pytest.param(lambda n: sources_of(n, 1, 1), id="one holder"),
        pytest.param(lambda n: sources_of(n, n, 1), id="as many holders as targets"),
        pytest.param(lambda n: sources_of(n, n, n), id="on two hosts"),
        pytest.param(lambda n: choose_warm(IMAGE, MIB, n, nodes_of(n)), id="host copies"),
        pytest.param(lambda n: delivery_of(n, 1), id="a cast from one"),
        pytest.param(lambda n: delivery_of(n, n), id="a cast from as many"),
    ],
)
def test_four_times_the_nodes_are_about_four_times_the_work(work: Callable[[int], object]) -> None:
    # Sorting adds a little; what is quadratic would be sixteen times.
    assert calls_made(lambda: work(MANY)) < 6 * calls_made(lambda: work(FEW))


def test_of_many_holders_each_target_asks_eight_others_and_all_are_asked() -> None:
    held = nodes_of(64, Tier.HOST, prefix="held")
    givers = ImageHolders(IMAGE, held, nodes_of(4, prefix="coming"))
    asked = Counter[str]()
    for target in nodes_of(512):
        names = [holder.node for holder in givers.for_target(target)]
        assert len(names) == len(set(names)) == MOST_HOLDERS and names[0].startswith("held")
        assert givers.for_target(target) == ImageHolders(IMAGE, held, []).for_target(target)
        asked[names[0]] += 1
    # 8 of 512 each in the mean: some three times the deviation that chance makes.
    assert len(asked) == 64 and max(asked.values()) <= 20


@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 4), st.integers(0, 12))
def test_nobody_who_could_give_is_left_out_while_there_is_room(
    memory: int, accelerators: int, beside: int, coming: int
) -> None:
    target = make_node("t", host="here")
    held = [
        make_node(f"m{n}", host="there", holdings=(make_holding("image-1", Tier.HOST),))
        for n in range(memory)
    ]
    held += [make_node(f"g{n}", holdings=(make_holding("image-1", Tier.GPU),)) for n in range(accelerators)]
    held += [
        make_node(f"b{n}", host="here", holdings=(make_holding("image-1", Tier.GPU),)) for n in range(beside)
    ]
    late = [make_node(f"c{n}") for n in range(coming)]
    kinds = [
        holder.node[0] for holder in ImageHolders(IMAGE, [target, *held], [target, *late]).for_target(target)
    ]
    everybody = "b" * beside + "m" * memory + "g" * accelerators + "c" * coming
    assert "".join(kinds) == everybody[:MOST_HOLDERS]
