"""Pairs of a node that loads and an instance that is ready: when they form and end."""

from collections.abc import Iterable
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.live.group import ClosePipeline, StartPipeline
from gateway.live.pairs import PairAction, PairGroup, UpdatePair, pair_rate
from registry.records.live import LiveMode, LivePipeline

LAYERS = 8
ALL = (1 << LAYERS) - 1


def made(ready: dict[str, str] | None = None, **loading: str) -> PairGroup:
    """Of the nodes of the `ready` instances, and `loading` nodes with their instances."""
    numbers = count()
    pairs = PairGroup(LAYERS, 4, lambda: f"p{next(numbers)}")
    assert pairs.set_ready(ready or {}) == ()
    for node, instance in loading.items():
        assert pairs.add(node, instance, 0) == ()
    return pairs


def opened(actions: Iterable[PairAction]) -> LivePipeline:
    (todo,) = actions
    assert isinstance(todo, StartPipeline)
    return todo.pipeline


def test_a_target_helps_from_its_first_layer_on_until_it_is_ready() -> None:
    pairs = made()
    assert pairs.is_over
    assert pairs.set_ready({"s": "n0"}) == ()
    assert pairs.add("n1", "t", 0) == ()
    assert pairs.on_layers("n1", "t", 0b110) == ()  # without the first layer the others are of no use
    pair = opened(pairs.on_layers("n1", "t", 0b1))
    assert pair.way is LiveMode.ZIGZAG and pair.rate == 1.0 and pair.slots == 8 and pair.head == 1
    assert [(s.node, s.instance_id, s.first, s.last) for s in pair.stages] == [
        ("n1", "t", 0, 7),
        ("n0", "s", 7, 8),
    ]
    assert pair.source == pair.stages[1]
    assert "n1" in repr(pairs)
    assert pairs.on_ready("n1", "another") == ()
    (close,) = pairs.on_ready("n1", "t")
    assert close == ClosePipeline(pipeline_id=pair.pipeline_id, reason="n1 holds all layers")
    assert pairs.is_over


def test_a_growing_rate_is_published() -> None:
    pairs = made({"s": "n0"}, n1="t")
    pair = opened(pairs.on_layers("n1", "t", 0b11))
    assert pair.rate == 1.25
    (grown,) = pairs.on_layers("n1", "t", 0b111)
    assert isinstance(grown, UpdatePair)
    assert grown.pipeline.name == pair.name and grown.pipeline.rate == 1.5
    (grown,) = pairs.on_layers("n1", "t", ALL)
    assert isinstance(grown, UpdatePair) and grown.pipeline.rate == 2.0
    assert pairs.on_layers("n1", "t", ALL) == ()


@pytest.mark.parametrize(("layers", "rate"), [(0, 1.0), (1, 1.0), (2, 1.25), (3, 1.5), (4, 2.0), (7, 2.0)])
def test_rates(layers: int, rate: float) -> None:
    assert pair_rate(layers, LAYERS) == rate


def test_each_is_in_one_pair_and_the_rest_wait() -> None:
    pairs = made({"s": "n0"}, n1="n1", n2="n2")
    first = opened(pairs.on_layers("n1", "n1", 0b1))
    assert pairs.on_layers("n2", "n2", 0b111) == ()
    close, after = pairs.on_ready("n1", "n1")
    assert isinstance(close, ClosePipeline) and isinstance(after, StartPipeline)
    assert after.pipeline.stages[0].node == "n2" and after.pipeline.name != first.name
    assert pairs.set_ready({"s": "n0", "n1": "n1"}) == ()
    pairs.add("n3", "n3", 0)
    second = opened(pairs.on_layers("n3", "n3", 0b1))
    assert second.stages[1].instance_id == "n1"  # which helped before


def test_the_last_of_a_chain_helps() -> None:
    pairs = made({"s": "n0"})
    for place in (1, 2, 3):
        assert pairs.add(f"n{place}", f"n{place}", 0, place) == ()
    assert pairs.on_layers("n1", "n1", 0b11) == pairs.on_layers("n2", "n2", 0b1) == ()
    assert opened(pairs.on_layers("n3", "n3", 0b1)).stages[0].node == "n3"
    (more,) = pairs.set_ready({"s": "n0", "r": "n4"})
    assert isinstance(more, StartPipeline) and more.pipeline.stages[0].node == "n2"
    pairs = made({"s": "n0"})
    pairs.add("n1", "n1", 0, 1)
    pairs.add("n2", "n2", 0, 2)
    assert pairs.on_layers("n1", "n1", 0b1) == ()
    (instead,) = pairs.remove("n2", "n2", "stopped")
    assert isinstance(instead, StartPipeline) and instead.pipeline.stages[0].node == "n1"


def test_a_lost_source_is_replaced() -> None:
    pairs = made({"s": "n0"}, n2="t")
    pair = opened(pairs.on_layers("n2", "t", 0b1))
    close, after = pairs.set_ready({"r": "n1"})
    assert close == ClosePipeline(pipeline_id=pair.pipeline_id, reason="n0 serves no more")
    assert isinstance(after, StartPipeline) and after.pipeline.stages[1].instance_id == "r"


def test_no_node_helps_itself() -> None:
    pairs = made()
    pairs.add("n1", "t", 0)
    assert pairs.on_layers("n1", "t", ALL) == ()
    assert pairs.set_ready({"t": "n1"}) == ()  # its record is ready, its start has not ended yet
    assert pairs.on_ready("n1", "t") == () and pairs.is_over


def test_a_member_that_failed_a_pair_is_in_none_again() -> None:
    pairs = made({"s": "n0", "r": "n1"}, n2="t", n3="u")
    pair = opened(pairs.on_layers("n2", "t", 0b1))
    assert pairs.on_lost("other", 0, "n2", "why") == ()
    again = opened(pairs.on_lost(pair.pipeline_id, 0, "n0", "no room"))
    assert again.stages[1].instance_id == "r"
    assert pairs.on_lost(again.pipeline_id, 0, "n2", "its link broke") == ()
    assert opened(pairs.on_layers("n3", "u", 0b1)).stages[1].instance_id == "r"
    assert pairs.remove("n2", "t", "stopped") == ()
    (close,) = pairs.remove("n3", "u", "stopped")
    assert isinstance(close, ClosePipeline) and pairs.is_over


def test_a_restart_ends_the_pair() -> None:
    pairs = made({"s": "n0"}, n1="t")
    pair = opened(pairs.on_layers("n1", "t", 0b1))
    (close,) = pairs.add("n1", "t2", 0)
    assert isinstance(close, ClosePipeline) and close.pipeline_id == pair.pipeline_id
    assert pairs.on_layers("n1", "t", 0b11) == ()
    assert opened(pairs.on_layers("n1", "t2", 0b1)).stages[0].instance_id == "t2"


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "holds", "ready", "gone", "lost", "sources"]),
        st.integers(0, 3),
        st.integers(0, ALL),
    ),
    max_size=40,
)


@given(events=EVENTS)
@settings(max_examples=150)
def test_no_node_is_in_two_pairs_and_all_that_open_close(
    events: list[tuple[str, int, int]],
) -> None:
    pairs, open_now = made(), dict[str, LivePipeline]()

    def carry_out(actions: Iterable[PairAction]) -> None:
        for todo in actions:
            if isinstance(todo, ClosePipeline):
                del open_now[todo.pipeline_id]
            else:
                assert isinstance(todo, UpdatePair) is (todo.pipeline.pipeline_id in open_now)
                open_now[todo.pipeline.pipeline_id] = todo.pipeline
        members = [stage.instance_id for one in open_now.values() for stage in one.stages]
        assert len(members) == len(set(members))

    for kind, number, bits in events:
        node = f"n{number}"
        match kind:
            case "begin":
                carry_out(pairs.add(node, node, 0))
            case "holds":
                carry_out(pairs.on_layers(node, node, bits))
            case "ready":
                carry_out(pairs.on_ready(node, node))
            case "gone":
                carry_out(pairs.remove(node, node, "gone"))
            case "lost" if open_now:
                pair = next(iter(open_now.values()))
                del open_now[pair.pipeline_id]
                carry_out(pairs.on_lost(pair.pipeline_id, 0, pair.stages[number % 2].node, "lost"))
            case "sources":
                carry_out(pairs.set_ready({f"s{one}": f"m{one}" for one in range(4) if bits >> one & 1}))
    carry_out(pairs.set_ready({}))
    assert not open_now
