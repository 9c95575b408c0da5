"""Link rates measured by finished casts, and the next plan that uses them."""

import asyncio
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from gateway.cluster.condition import ChangeCondition
from gateway.cluster.link_estimates import estimate_links
from gateway.cluster.link_rates import LinkRateCache
from gateway.cluster.state_cache import ClusterStateCache
from gateway.cluster.sync import ClusterStateSync
from gateway.planning.cast_planner import CastPlanner
from rdmacast.cast.record import CastMember
from rdmacast.link_rate import LinkRate
from registry.clock import SystemClock
from registry.memory.state import MemoryState
from registry.records.cast import CastProgress, CastRecord, CastState, CastStatus
from registry.records.change import CastChanged, CastPartEnded, NodeUp
from registry.records.node import NodeRecord, Tier
from tests.fixtures.control import MIB, make_holding, make_node, make_version
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.registry_records import cast, cast_progress

NBYTES, BLOCKS = 64 * MIB, 64
VERSION = make_version("f", image="image", nbytes=NBYTES)


def record(cast_id: str, *names: str, **changes: object) -> CastRecord:
    """From the first of these nodes to the others."""
    members = tuple(CastMember(node=name, host=name, address="tcp://127.0.0.1:1") for name in names)
    return cast(cast_id, nbytes=NBYTES, block_bytes=MIB, members=members, planned=len(members), **changes)


def part(cast_id: str, node: str, rate: float, *givers: str, **changes: object) -> CastProgress:
    """Return a node's last word, to which all came at `rate` (bytes per second), from each giver as much."""
    transport = str(changes.pop("transport", "tcp"))
    reported = cast_progress(
        node,
        cast_id=cast_id,
        state=CastState.COMPLETE,
        blocks=BLOCKS,
        held=BLOCKS,
        received={transport: NBYTES},
        span_s=NBYTES * (BLOCKS - 1) / BLOCKS / rate,
        pulled={giver: NBYTES // len(givers) for giver in givers},
    )
    return replace(reported, **changes)


def learn(links: LinkRateCache, cast_id: str, rates: dict[str, float], **changes: object) -> None:
    """Return a chain from node `s` through the others in this order."""
    names = ["s", *rates]
    for giver, (node, rate) in zip(names, rates.items(), strict=False):
        links.on_part_ended(part(cast_id, node, rate, giver, **changes))
    links.on_cast_ended(record(cast_id, *names))


def learnt(*casts: dict[str, float], **changes: object) -> LinkRateCache:
    """Return what casts c0, c1 and so on show."""
    links = LinkRateCache()
    for number, rates in enumerate(casts):
        learn(links, f"c{number}", rates, **changes)
    return links


def rate_of(links: LinkRateCache, node: str) -> float:
    known = links.get(node)
    assert known is not None
    return round(known.bytes_per_s)


def test_a_node_that_is_slower_than_who_gave_to_it_is_known_exactly_others_at_least() -> None:
    links = learnt({"a": 100e6, "b": 98e6, "c": 40e6, "d": 40e6})
    found = {node: links.get(node) for node in "abcd"}
    assert {node: known.exact for node, known in found.items() if known} == {
        "a": True,  # from a source, which had all
        "b": False,
        "c": True,
        "d": False,
    }
    assert [rate_of(links, node) for node in "abcd"] == [100e6, 98e6, 40e6, 40e6]
    assert links.get("s") is None and links.is_counted("c0")


def test_recent_casts_count_more_and_a_node_that_was_held_back_is_no_slower_for_it() -> None:
    links = LinkRateCache()
    for number in range(4):
        learn(links, f"c{number}", {"a": 100e6, "b": 100e6})
    learn(links, "c4", {"a": 20e6, "b": 20e6})
    assert (rate_of(links, "a"), rate_of(links, "b")) == (60e6, 100e6)
    for number in range(5, 12):
        learn(links, f"c{number}", {"a": 20e6, "b": 140e6})
    assert rate_of(links, "a") < 21e6 and rate_of(links, "b") > 139e6
    known = links.get("a")
    assert known is not None and known.casts == tuple(range(5, 13))


def test_another_transport_begins_anew() -> None:
    links = learnt({"a": 1e9})
    learn(links, "c1", {"a": 20e9}, transport="verbs")
    known = links.get("a")
    assert known is not None and (known.transport, rate_of(links, "a"), known.casts) == ("verbs", 20e9, (2,))


def test_what_was_disturbed_or_small_or_not_complete_tells_nothing_of_links() -> None:
    links = LinkRateCache()
    for changes in (
        {"faults": {"late": 1}},
        {"faults": {"lost": 1}},
        {"state": CastState.FAILED},
        {"received": {"tcp": MIB}},
        {"received": {}},
        {"span_s": 0.0},
        {"blocks": 4},
    ):
        learn(links, "c0", {"a": 1e8}, **changes)
    assert links.get("a") is None and not links.is_counted("c0")
    learn(links, "c0", {"a": 1e8}, faults={"slow": 1, "replanned": 2})
    assert links.get("a") is not None


def test_a_cast_counts_once_whatever_is_told_later() -> None:
    links = learnt({"a": 1e8})
    learn(links, "c0", {"a": 1e6, "b": 1e6})
    links.on_status(CastStatus(record=record("c0", "s", "a"), progress=(part("c0", "a", 1e6, "s"),)))
    assert rate_of(links, "a") == 1e8 and links.get("b") is None


def test_one_that_is_under_way_does_not_count_yet() -> None:
    links = LinkRateCache()
    status = CastStatus(record=record("c0", "s", "a", "b"), progress=(part("c0", "a", 1e8, "s"),))
    links.on_status(status)
    assert links.get("a") is None and not links.is_counted("c0")
    links.on_status(replace(status, progress=(*status.progress, part("c0", "b", 1e8, "a"))))
    assert rate_of(links, "a") == 1e8


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 200)), max_size=60))
def test_a_rate_is_never_beyond_what_was_seen(reported: list[tuple[int, int]]) -> None:
    links, seen = LinkRateCache(), dict[str, list[float]]()
    for number, (node, rate) in enumerate(reported):
        learn(links, f"c{number}", {"first": 300e6, f"n{node}": rate * 1e6})
        seen.setdefault(f"n{node}", []).append(rate * 1e6)
    for name, rates in seen.items():
        known = links.get(name)
        assert known is not None and min(rates) - 1 <= known.bytes_per_s <= max(rates) + 1
        assert known.exact == any(rate < 240e6 for rate in rates)


def test_memory_is_bounded() -> None:
    links = LinkRateCache()
    many = {f"n{number}": 1e8 for number in range(2500)}
    for number in range(8):  # that do not end
        for node in many:
            links.on_part_ended(part(f"open{number}", node, 1e8, "s"))
    for number in range(4):
        learn(links, f"c{number}", {f"{node} of {number}": rate for node, rate in many.items()})
    assert repr(links) == "<LinkRateCache 8192 nodes in 4 casts>"
    assert links.get("n0 of 0") is None and links.get("n2499 of 3") is not None
    assert not links.is_counted("open0")


def nodes_of(*names: str, **changes: object) -> list[NodeRecord]:
    return [make_node(name, host=name, **changes) for name in names]


def test_who_was_not_measured_is_taken_to_be_like_the_others() -> None:
    links = learnt({"a": 25e6, "b": 25e6}, {"b": 25e6})
    known = estimate_links(nodes_of("a", "b", "new"), links)
    assert {node: round(rate) for node, rate in known.rates.items()} == dict.fromkeys(known.rates, 25e6)
    assert known.summary == "2 links as measured over tcp in 2 casts, 1 links of 0.2 Gbit/s assumed"
    assert estimate_links(nodes_of("a"), links).summary == "links as measured over tcp in 1 cast"
    assert estimate_links(nodes_of("new"), links).summary == "links of 10 Gbit/s assumed"


def test_who_was_only_seen_behind_slow_ones_is_not_taken_to_be_slow() -> None:
    links = learnt({"a": 100e6, "b": 98e6, "c": 96e6}, {"slow": 30e6, "behind": 30e6})
    known = estimate_links(nodes_of("a", "b", "c", "slow", "behind"), links)
    assert [round(known.rates[node]) for node in ("slow", "behind", "c")] == [30e6, 96e6, 96e6]


def test_a_link_that_was_never_seen_is_assumed_to_be_no_faster_than_its_port() -> None:
    links = LinkRateCache()
    nodes = nodes_of("a", port_rate_bytes_s=10**7)
    known = estimate_links(nodes, links)
    assert (known.rates, known.summary) == ({"a": 1e7}, "links as fast as their ports")
    assert known.min_rate("a") == 0  # nobody has measured it
    assert estimate_links(nodes_of("a", port_rate_bytes_s=5 * 10**9), links).rates == {"a": 5e9}
    assert estimate_links(nodes, LinkRateCache(1e6)).rates == {"a": 1e6}  # the operator knows better
    assert estimate_links(nodes, LinkRateCache(1e9)).rates == {"a": 1e7}
    capped = nodes_of("a", port_rate_bytes_s=10**7, link_rate_bytes_s=10**6)
    assert estimate_links(capped, links).rates == {"a": 1e6}
    learn(links, "c0", {"b": 25e6})
    learn(links, "c1", {"c": 2e6, "a": 2e6})  # it waited for c
    more = [*nodes, *nodes_of("b", "new"), *nodes_of("slow", port_rate_bytes_s=10**6)]
    known = estimate_links(more, links)
    assert [round(known.rates[node]) for node in ("a", "b", "new", "slow")] == [2e6, 25e6, 2e6, 1e6]
    assert known.summary.endswith("1 links as fast as their ports, 1 links of 0.016 Gbit/s assumed")


def test_the_usual_rate_is_measured_configured_or_assumed() -> None:
    assert LinkRateCache().usual_bytes_per_s() == LinkRate().bytes_per_s
    links = LinkRateCache(3e8)
    assert links.usual_bytes_per_s() == 3e8
    learn(links, "c0", {"a": 100e6, "b": 40e6, "c": 90e6})
    assert round(links.usual_bytes_per_s()) == 90e6


def test_a_cap_holds_unless_the_link_is_known_to_give_less() -> None:
    links = learnt({"a": 25e6, "b": 25e6})
    known = estimate_links(nodes_of("a", "b", link_rate_bytes_s=10**8), links)
    assert {node: round(rate) for node, rate in known.rates.items()} == {"a": 25e6, "b": 10**8}
    assert known.summary == "1 links as measured over tcp in 1 cast, 1 links as capped"
    known = estimate_links(nodes_of("a", link_rate_bytes_s=10**6), links)
    assert (known.rates, known.summary) == ({"a": 1e6}, "links as capped")


def test_a_change_of_partners_costs_only_tcp() -> None:
    links = learnt({"a": 20e9, "b": 20e9}, transport="verbs")
    assert estimate_links(nodes_of("a", "b"), links).facts.restart_s == 0.0
    learn(links, "c1", {"c": 1e9})
    assert estimate_links(nodes_of("a", "b", "c"), links).facts.restart_s > 0.0  # one is over TCP
    assert estimate_links(nodes_of("new"), links).facts.restart_s > 0.0


class World:
    """A state cache whose nodes `s`, which holds the image, and `n0`… are there."""

    def __init__(self, targets: int = 6) -> None:
        self.state_cache = ClusterStateCache()
        self.targets = [f"n{number}" for number in range(targets)]
        self.reach()

    def reach(self) -> None:
        held = (make_holding("image", Tier.HOST, nbytes=NBYTES),)
        for name in ("s", *self.targets):
            up = NodeUp(record=make_node(name, host=name, holdings=held if name == "s" else ()), ttl_s=60.0)
            self.state_cache.apply(up, 0.0)
            self.state_cache.channel_up(name, up.record.epoch)

    def plan(self) -> CastRecord:
        asked = dict.fromkeys(self.targets, ())
        planned = (
            CastPlanner().deliver(self.state_cache, VERSION, asked, lambda state_cache, image: [], 100.0).cast
        )
        assert planned is not None
        return planned

    def reported(self, planned: CastRecord, rates: dict[str, float], transport: str) -> list[CastPartEnded]:
        return [
            CastPartEnded(progress=part(planned.cast_id, node, rate, "s", transport=transport))
            for node, rate in rates.items()
        ]


def test_the_next_plan_goes_by_what_the_last_cast_showed_and_says_so() -> None:
    world = World()
    first = world.plan()
    assert first.reason.endswith("(links of 10 Gbit/s assumed)")
    world.state_cache.apply(CastChanged(record=first), 0.0)
    rates = {name: 2e6 if name == "n3" else 1e7 for name in world.targets}
    for change in world.reported(first, rates, "verbs"):
        world.state_cache.apply(change, 1.0)
    second = world.plan()
    assert second.reason.endswith(
        "(6 links as measured over verbs in 1 cast, 1 links of 0.08 Gbit/s assumed)"
    )
    assert [second.members[node].node for node in second.edge] == ["n3"]
    assert second.planner == "binomial"  # no restarts


async def test_a_new_controller_learns_from_what_is_kept_of_casts() -> None:
    state, world = MemoryState(), World()
    planned = replace(world.plan(), cast_id="c0", started_at=1.0)
    await state.put_cast(planned)
    for change in world.reported(planned, dict.fromkeys(world.targets, 25e6), "tcp"):
        await state.put_cast_progress(change.progress)
    await state.put_cast(record("c1", "s", "other", started_at=2.0))  # no node has reported yet
    other = World()
    sync = ClusterStateSync(state, other.state_cache, ChangeCondition(), SystemClock())
    task = asyncio.create_task(sync.run())
    try:
        async with asyncio.timeout(PATIENCE_S):
            await sync.ready.wait()
    finally:
        task.cancel()
    other.reach()
    assert "6 links as measured over tcp in 1 cast" in other.plan().reason
    assert not other.state_cache.link_rates.is_counted("c1")
