"""Decisions on pipelines: worked examples, and the law under any events (see pipelines_fixture.py)."""

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.dispatch.targets import UnfinishedRequest
from gateway.live.actions import (
    Create,
    LayersReported,
    LoadStarted,
    NodeLost,
    PipelineAction,
    PipelineEvent,
    Promote,
    Reconfigure,
    Teardown,
)
from gateway.live.assembler import AssemblerSettings, PipelineAssembler
from gateway.live.model_layers import even_layers
from tests.fixtures.pipelines import Cluster

LAYERS = 8
ALL = (1 << LAYERS) - 1
LOW, HIGH = 0b00001111, 0b11110000


def loading(settings: AssemblerSettings | None = None, layers: int = LAYERS, **groups: int) -> Cluster:
    """Return a cluster whose nodes load in these groups."""
    cluster = Cluster(even_layers(layers), settings)
    cluster.apply(*(LoadStarted(node=node, group=group) for node, group in groups.items()))
    return cluster


def holds(cluster: Cluster, **blocks: int) -> tuple[PipelineAction, ...]:
    """Report what nodes hold, all at once."""
    return cluster.apply(*(LayersReported(node=node, blocks=held) for node, held in blocks.items()))


def send(cluster: Cluster, calls: int) -> None:
    requests = [UnfinishedRequest(request_id=f"r{number}", tokens=10) for number in range(calls)]
    cluster.send(requests, "pipeline-0")


def described(action: PipelineAction) -> str:
    """Format an action without its reason."""
    if isinstance(action, Create | Reconfigure):
        stages = " ".join(f"{s.node}[{s.first},{s.last})" for s in action.pipeline.stages)
        return f"{type(action).__name__} {action.pipeline.number}: {stages}"
    if isinstance(action, Promote):
        return f"Promote {action.node} of {action.sharers}"
    return f"Teardown {action.pipeline.number}"


def test_a_pair_forms_serves_and_switches() -> None:
    cluster = loading(a=0, b=1)
    assert holds(cluster, a=LOW) == ()
    (formed,) = holds(cluster, b=HIGH)
    assert described(formed) == "Create 0: a[0,4) b[4,8)"
    assert formed.reason == "a and b hold all layers between them"
    assert isinstance(formed, Create) and repr(formed.pipeline) == "Pipeline(0.0: a[0,4) b[4,8), 1.82 nodes)"
    send(cluster, 4)
    assert holds(cluster, a=LOW | 0b10000) == ()
    (alone,) = holds(cluster, a=ALL)
    assert described(alone) == "Promote a of 2" and alone.reason == "a holds all layers"
    assert len(cluster.places["a"]) == len(cluster.places["pipeline-0"]) == 2
    assert cluster.decisions.pipelines[0].rate < 1 < formed.pipeline.rate  # a has less time for its stage
    last = holds(cluster, b=ALL)
    assert [described(action) for action in last] == ["Promote b of 1", "Teardown 0"]
    assert len(cluster.places["a"]) == len(cluster.places["b"]) == 2


def test_a_pipeline_takes_other_groups_first() -> None:
    cluster = loading(a0=0, a1=0, b0=1, b1=1)
    actions = holds(cluster, a0=LOW, a1=LOW, b0=HIGH, b1=HIGH)
    assert [described(a) for a in actions] == ["Create 0: a0[0,4) b0[4,8)", "Create 1: a1[0,4) b1[4,8)"]


def test_a_better_set_takes_over_only_for_enough() -> None:
    cluster = loading(AssemblerSettings(hop_cost=0.0, gain=1.25), a=0, b=1)
    (formed,) = holds(cluster, a=0b0011_1111, b=0b1100_0000)
    assert described(formed) == "Create 0: a[0,6) b[6,8)"
    # With one layer more b could serve 8/5 instead of 8/6 nodes' worth: not enough to recompute.
    assert holds(cluster, b=0b1110_0000) == ()
    (better,) = holds(cluster, b=0b1111_0000)
    assert described(better) == "Reconfigure 0: a[0,4) b[4,8)"
    assert better.reason == "it could serve 2.00 nodes' worth instead of 1.33"


def test_what_is_nearly_whole_stays_as_it_is() -> None:
    cluster = loading(AssemblerSettings(hop_cost=0.0, gain=1.25), a=0, b=1)
    holds(cluster, a=0b0111_1111, b=0b1000_0000)
    assert holds(cluster, b=ALL ^ 1) == ()  # 2 instead of 8/7, for an eighth of the time


def test_a_node_that_is_left_over_joins() -> None:
    cluster = loading(AssemblerSettings(hop_cost=0.0, gain=1.3), a=0, b=1, c=1)
    holds(cluster, a=LOW, b=HIGH)
    assert holds(cluster, c=0b1100_0000) == ()
    assert [pipeline.nodes for pipeline in cluster.decisions.pipelines] == [("a", "b")]
    actions = holds(cluster, c=0b1111_0000, a=LOW)
    assert actions == ()  # c has only what b has: a's four layers remain the slowest stage
    (joined,) = holds(cluster, c=0b1111_1100)
    assert described(joined) == "Reconfigure 0: a[0,2) c[2,5) b[5,8)"


def test_a_node_more_is_taken_at_once_where_it_makes_much_of_a_difference() -> None:
    for held, formed in (
        (0b0011_1100, "Create 0: a[0,2) c[2,5) b[5,8)"),
        (0b0000_1000, "Create 0: a[0,4) b[4,8)"),  # b's four layers remain the slowest stage
    ):
        cluster = loading(a=0, b=1, c=1)
        assert holds(cluster, c=held, a=LOW) == ()
        assert [described(action) for action in holds(cluster, b=HIGH)] == [formed]


def test_two_pipelines_stay_two_where_one_of_all_would_serve_little_more() -> None:
    cluster = loading(AssemblerSettings(hop_cost=0.0), a=0, b=1, c=0, d=1)
    assert holds(cluster, a=0b0011_1111, c=0b0011_1111) == ()
    formed = holds(cluster, b=0b1111_1100, d=0b1111_1100)
    assert [len(action.pipeline.nodes) for action in formed if isinstance(action, Create)] == [2, 2]


def test_death_of_a_member() -> None:
    cluster = loading(a=0, b=1, c=1, d=0)
    holds(cluster, a=LOW, b=HIGH)
    send(cluster, 1)
    holds(cluster, c=HIGH)
    (reformed,) = cluster.apply(NodeLost(node="b", reason="its channel broke"))
    assert described(reformed) == "Reconfigure 0: a[0,4) c[4,8)"
    assert reformed.reason == "b is lost (its channel broke); a and c serve on"
    (ended,) = cluster.apply(NodeLost(node="c", reason="killed"))
    assert described(ended) == "Teardown 0"
    assert ended.reason == "c is lost (killed); no free node holds layer 4"
    assert cluster.places[""] == {"r0"}  # held until a target has room
    assert cluster.apply(NodeLost(node="unknown", reason="killed")) == ()
    (formed,) = holds(cluster, d=HIGH)
    assert described(formed) == "Create 1: a[0,4) d[4,8)"


def test_whole_members_take_over_from_a_dead_one() -> None:
    cluster = loading(a=0, b=1, c=1)
    holds(cluster, a=LOW, b=HIGH)
    send(cluster, 4)
    holds(cluster, a=ALL, c=HIGH)
    (ended,) = cluster.apply(NodeLost(node="b", reason="killed"))
    assert described(ended) == "Teardown 0" and ended.reason == "b is lost (killed); a serve alone"
    assert len(cluster.places["a"]) == 4


def test_one_dies_as_the_other_becomes_whole() -> None:
    cluster = loading(a=0, b=1)
    holds(cluster, a=LOW, b=HIGH)
    send(cluster, 4)
    actions = cluster.apply(NodeLost(node="b", reason="killed"), LayersReported(node="a", blocks=ALL))
    assert [described(action) for action in actions] == ["Promote a of 1", "Teardown 0"]
    assert len(cluster.places["a"]) == 4


def test_nodes_that_load_from_their_own_memory_serve_with_those_of_a_cast() -> None:
    """One of each sort: the warm one began in the middle, in a group of its own."""
    cluster = loading(warm=100, cold=0)
    holds(cluster, warm=0b0111_0000, cold=0b0000_1111)
    (formed,) = holds(cluster, warm=HIGH)
    assert described(formed) == "Create 0: cold[0,4) warm[4,8)"


def test_faster_nodes_run_more_layers() -> None:
    decisions = PipelineAssembler(even_layers(LAYERS))
    events: list[PipelineEvent] = [LoadStarted(node="a", group=0, speed=3.0), LoadStarted(node="b", group=1)]
    events += [LayersReported(node="a", blocks=ALL >> 1), LayersReported(node="b", blocks=ALL ^ 1)]
    (formed,) = decisions.apply(events)
    assert described(formed) == "Create 0: a[0,6) b[6,8)"
    assert repr(decisions) == "<Pipelines [Pipeline(0.0: a[0,6) b[6,8), 3.33 nodes)], whole []>"


NODES = st.sampled_from("abcdef")
EVENTS = st.one_of(
    st.builds(LoadStarted, node=NODES, group=st.integers(0, 2)),
    st.builds(LayersReported, node=NODES, blocks=st.integers(0, (1 << 5) - 1)),
    st.builds(NodeLost, node=NODES, reason=st.just("killed")),
)


@given(
    batches=st.lists(st.lists(EVENTS, min_size=1, max_size=4), max_size=25),
    gain=st.sampled_from([1.01, 1.5, float("inf")]),
    hop_cost=st.sampled_from([0.0, 0.05, 0.5]),
    max_stages=st.integers(2, 5),
)
@settings(max_examples=300)
def test_the_law_holds_under_any_events(
    batches: list[list[PipelineEvent]], gain: float, hop_cost: float, max_stages: int
) -> None:
    setting = AssemblerSettings(gain=gain, hop_cost=hop_cost, max_stages=max_stages)
    cluster = loading(setting, 5, a=0, b=0, c=1, d=1)
    sent = 0
    for batch in batches:
        cluster.apply(*batch)
        for pipeline in cluster.pipelines.values():
            assert len(pipeline.nodes) <= max_stages
            cluster.send(
                [UnfinishedRequest(request_id=f"r{sent}", tokens=sent % 7)], f"pipeline-{pipeline.number}"
            )
            sent += 1
    assert not any(isinstance(action, Teardown) and not action.reason for action in cluster.log)
    # When the last blocks come, all that live are whole and no pipeline is left.
    cluster.apply(*(LayersReported(node=node, blocks=0b11111) for node in sorted(cluster.held)))
    assert not cluster.pipelines and set(cluster.whole) == set(cluster.held)
