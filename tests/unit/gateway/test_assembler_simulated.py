"""Pipelines while plans are carried out: when the first one serves, that all end whole, and deaths."""

import random

import numpy as np
import pytest

from gateway.dispatch.targets import UnfinishedRequest
from gateway.live.actions import Create, LayersReported, LoadStarted, NodeLost, Promote, Reconfigure, Teardown
from gateway.live.assembler import AssemblerSettings
from gateway.live.model_layers import even_layers
from rdmacast.bitfield import to_bits
from rdmacast.plan.plan import CastShape, TransferPlan
from rdmacast.plan.planners.catalog import PLANNERS
from rdmacast.simulate.link_model import LinkModel
from rdmacast.simulate.plans import simulate
from tests.fixtures.pipelines import Cluster


def planned(nodes: int, k: int, blocks: int, planner: str = "binomial") -> TransferPlan:
    return PLANNERS[planner].plan(CastShape(nodes=nodes, sources=tuple(range(k)), blocks=blocks))


def joining(plan: TransferPlan) -> list[LoadStarted]:
    groups = {node: number for number, group in enumerate(plan.groups) for node in group}
    return [LoadStarted(node=f"n{target}", group=groups[target]) for target in plan.shape.targets]


def requests(count: int) -> list[UnfinishedRequest]:
    return [UnfinishedRequest(request_id=f"r{number:02}", tokens=100) for number in range(count)]


@pytest.mark.parametrize("blocks", [8, 16, 64])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_first_pipeline_serves_early_and_all_end_whole(k: int, blocks: int) -> None:
    plan = planned(8, k, blocks)
    arrived = plan.arrivals()
    cluster = Cluster(even_layers(blocks))
    cluster.apply(*joining(plan))
    first = None
    for step in range(1, plan.steps + 1):
        actions = cluster.apply(
            *(
                LayersReported(
                    node=f"n{node}", blocks=to_bits(np.flatnonzero(arrived[node] <= step).tolist())
                )
                for node in plan.shape.targets
            )
        )
        formed = [action for action in actions if isinstance(action, Create)]
        if formed and first is None:
            first = step
            place = f"pipeline-{formed[0].pipeline.number}"
            cluster.send(requests(24), place)
    members = 8 // k
    assert first is not None and first <= -(-blocks // k) + (members - 1).bit_length()
    assert set(cluster.whole) == {f"n{node}" for node in plan.shape.targets} and not cluster.pipelines
    shares = [len(cluster.places[node]) for node in cluster.whole if cluster.places[node]]
    assert sum(shares) == 24 and max(shares) - min(shares) <= 1
    assert set(cluster.moves.values()) == {1}  # each request's keys and values are computed once


@pytest.mark.parametrize("planner", ["binomial", "chain", "tree", "scatter-allgather"])
@pytest.mark.parametrize(("nodes", "k"), [(8, 1), (8, 2), (8, 4), (13, 3), (24, 2)])
def test_blocks_that_come_one_by_one(planner: str, nodes: int, k: int) -> None:
    """By time, with jitter: each block is an event of its own, as bitfields arrive."""
    plan = planned(nodes, k, 24, planner)
    run = simulate(plan, LinkModel(bytes_per_s=1.0, jitter=0.3, seed=3, in_flight=2))
    cluster = Cluster(even_layers(24))
    cluster.apply(*joining(plan))
    for _, node, block in arrivals(plan, run.arrived_s):
        cluster.apply(LayersReported(node=f"n{node}", blocks=1 << block))
    assert len(cluster.whole) == len(plan.shape.targets) and not cluster.pipelines
    kinds = [type(action) for action in cluster.log]
    assert kinds.count(Promote) == len(plan.shape.targets)
    # In a chain from one source the first target is whole before the others hold the last block.
    assert kinds.count(Create) == kinds.count(Teardown) >= int(k > 1)


def arrivals(plan: TransferPlan, arrived_s: np.ndarray) -> list[tuple[float, int, int]]:
    """In order of time, the targets' only."""
    rows = [
        (float(arrived_s[node, block]), node, block)
        for node in plan.shape.targets
        for block in range(plan.shape.blocks)
    ]
    return sorted(rows)


@pytest.mark.parametrize("seed", range(40))
def test_members_that_die_at_random(seed: int) -> None:
    """The members of each pipeline live and hold what they run, at any moment: the fixture checks."""
    rng = random.Random(seed)
    nodes, k = rng.choice([(8, 1), (8, 2), (8, 4), (12, 3), (16, 4)])
    plan = planned(nodes, k, rng.choice([8, 16, 24]), rng.choice(["binomial", "chain"]))
    run = simulate(plan, LinkModel(bytes_per_s=1.0, jitter=0.2, seed=seed, in_flight=2))
    cluster = Cluster(even_layers(plan.shape.blocks), AssemblerSettings(gain=rng.choice([1.2, 1.5, 1e9])))
    cluster.apply(*joining(plan))
    events = arrivals(plan, run.arrived_s)
    doomed = rng.sample(plan.shape.targets, rng.randint(1, len(plan.shape.targets) - 1))
    deaths = {rng.randrange(len(events)): f"n{node}" for node in doomed}
    dead: set[str] = set()
    sent = False
    for place, (_, node, block) in enumerate(events):
        if place in deaths:
            dead.add(deaths[place])
            cluster.apply(NodeLost(node=deaths[place], reason="killed"))
        if not sent and cluster.pipelines:
            sent = True
            cluster.send(requests(12), f"pipeline-{next(iter(cluster.pipelines))}")
        if f"n{node}" not in dead:
            # Others took over what a dead node was to pass on; that is for the cast.
            cluster.apply(LayersReported(node=f"n{node}", blocks=1 << block))
        elif rng.random() < 0.1:
            assert cluster.apply(LayersReported(node=f"n{node}", blocks=1 << block)) == ()
    living = {f"n{node}" for node in plan.shape.targets} - dead
    assert set(cluster.whole) == living and not cluster.pipelines


def test_a_node_that_comes_back_is_another_one() -> None:
    cluster = Cluster(even_layers(4))
    cluster.apply(*(LoadStarted(node=name, group=group) for group, name in enumerate("abc")))
    (formed,) = cluster.apply(
        LayersReported(node="a", blocks=0b0011), LayersReported(node="b", blocks=0b1100)
    )
    assert isinstance(formed, Create) and formed.pipeline.nodes == ("a", "b")
    cluster.apply(LayersReported(node="c", blocks=0b0110))
    back = cluster.apply(
        NodeLost(node="a", reason="restarted"),
        LoadStarted(node="a", group=0),
        LayersReported(node="a", blocks=0b0001),
        LayersReported(node="c", blocks=0b0011),
    )
    (again,) = back
    assert isinstance(again, Reconfigure) and again.pipeline.number == formed.pipeline.number
    assert again.reason.startswith("a is lost (restarted); ") and "b" in again.pipeline.nodes


def test_a_member_that_is_back_at_once_is_not_two() -> None:
    cluster = Cluster(even_layers(6), AssemblerSettings(hop_cost=0.0))
    cluster.apply(LoadStarted(node="a", group=0), LoadStarted(node="b", group=1))
    cluster.apply(LayersReported(node="a", blocks=0b000111), LayersReported(node="b", blocks=0b111000))
    actions = cluster.apply(
        NodeLost(node="a", reason="restarted"),
        LoadStarted(node="a", group=0),
        LayersReported(node="a", blocks=0b011111),
    )
    (again,) = actions
    assert isinstance(again, Reconfigure) and again.pipeline.nodes == ("a", "b")
