"""Pairs of a node that loads and an instance that is ready: when they begin and end, and with whom."""

from collections.abc import Iterable
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.live_group import Close, Open
from gateway.zigzag_pairs import Grown, PairTodo, ZigZagPairs, rate_of
from registry.live import Live, LivePipeline

LAYERS = 8
ALL = (1 << LAYERS) - 1


def made() -> ZigZagPairs:
    numbers = count()
    return ZigZagPairs(LAYERS, 4, lambda: f"p{next(numbers)}")


def opened(todos: Iterable[PairTodo]) -> LivePipeline:
    (todo,) = todos
    assert isinstance(todo, Open)
    return todo.pipeline


def test_a_target_helps_from_its_first_layer_on_until_it_is_ready() -> None:
    pairs = made()
    assert pairs.is_over
    assert pairs.sources({"s": "n0"}) == ()
    assert pairs.begin("n1", "t", 0) == ()
    assert pairs.holds("n1", "t", 0b110) == ()  # without the first layer the others are of no use
    pair = opened(pairs.holds("n1", "t", 0b1))
    assert pair.way is Live.ZIGZAG and pair.rate == 1.0 and pair.slots == 8 and pair.head == 1
    assert [(s.node, s.instance_id, s.first, s.last) for s in pair.stages] == [
        ("n1", "t", 0, 7),
        ("n0", "s", 7, 8),
    ]
    assert pair.source == pair.stages[1]
    assert "n1" in repr(pairs)
    assert pairs.ready("n1", "another") == ()
    (close,) = pairs.ready("n1", "t")
    assert close == Close(pipeline_id=pair.pipeline_id, reason="n1 holds all layers")
    assert pairs.is_over


def test_what_it_serves_is_told_as_it_grows() -> None:
    pairs = made()
    pairs.sources({"s": "n0"})
    pairs.begin("n1", "t", 0)
    pair = opened(pairs.holds("n1", "t", 0b11))
    assert pair.rate == 1.25
    (grown,) = pairs.holds("n1", "t", 0b111)
    assert isinstance(grown, Grown)
    assert grown.pipeline.name == pair.name and grown.pipeline.rate == 1.5
    (grown,) = pairs.holds("n1", "t", ALL)
    assert isinstance(grown, Grown) and grown.pipeline.rate == 2.0
    assert pairs.holds("n1", "t", ALL) == ()


@pytest.mark.parametrize(("layers", "rate"), [(0, 1.0), (1, 1.0), (2, 1.25), (3, 1.5), (4, 2.0), (7, 2.0)])
def test_rates(layers: int, rate: float) -> None:
    assert rate_of(layers, LAYERS) == rate


def test_each_is_in_one_pair_and_whoever_is_left_over_waits() -> None:
    pairs = made()
    pairs.sources({"s": "n0"})
    for node in ("n1", "n2"):
        pairs.begin(node, node, 0)
    first = opened(pairs.holds("n1", "n1", 0b1))
    assert pairs.holds("n2", "n2", 0b111) == ()
    close, after = pairs.ready("n1", "n1")
    assert isinstance(close, Close) and isinstance(after, Open)
    assert after.pipeline.stages[0].node == "n2" and after.pipeline.name != first.name
    assert pairs.sources({"s": "n0", "n1": "n1"}) == ()
    pairs.begin("n3", "n3", 0)
    second = opened(pairs.holds("n3", "n3", 0b1))
    assert second.stages[1].instance_id == "n1"  # which helped before


def test_a_source_that_is_gone_is_replaced() -> None:
    pairs = made()
    pairs.sources({"s": "n0"})
    pairs.begin("n2", "t", 0)
    pair = opened(pairs.holds("n2", "t", 0b1))
    close, after = pairs.sources({"r": "n1"})
    assert close == Close(pipeline_id=pair.pipeline_id, reason="n0 serves no longer")
    assert isinstance(after, Open) and after.pipeline.stages[1].instance_id == "r"


def test_nobody_helps_itself() -> None:
    pairs = made()
    pairs.begin("n1", "t", 0)
    assert pairs.holds("n1", "t", ALL) == ()
    assert pairs.sources({"t": "n1"}) == ()  # ready, as its record says; its start has not said so yet
    assert pairs.ready("n1", "t") == () and pairs.is_over


def test_who_failed_a_pair_is_in_none_again() -> None:
    pairs = made()
    pairs.sources({"s": "n0", "r": "n1"})
    pairs.begin("n2", "t", 0)
    pairs.begin("n3", "u", 0)
    pair = opened(pairs.holds("n2", "t", 0b1))
    assert pairs.lost("other", 0, "n2", "why") == ()
    again = opened(pairs.lost(pair.pipeline_id, 0, "n0", "no room"))
    assert again.stages[1].instance_id == "r"
    assert pairs.lost(again.pipeline_id, 0, "n2", "its link broke") == ()
    assert opened(pairs.holds("n3", "u", 0b1)).stages[1].instance_id == "r"
    assert pairs.gone("n2", "t", "stopped") == ()
    (close,) = pairs.gone("n3", "u", "stopped")
    assert isinstance(close, Close) and pairs.is_over


def test_a_start_that_begins_anew_ends_the_pair() -> None:
    pairs = made()
    pairs.sources({"s": "n0"})
    pairs.begin("n1", "t", 0)
    pair = opened(pairs.holds("n1", "t", 0b1))
    (close,) = pairs.begin("n1", "t2", 0)
    assert isinstance(close, Close) and close.pipeline_id == pair.pipeline_id
    assert pairs.holds("n1", "t", 0b11) == ()
    assert opened(pairs.holds("n1", "t2", 0b1)).stages[0].instance_id == "t2"


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "holds", "ready", "gone", "lost", "sources"]),
        st.integers(0, 3),
        st.integers(0, ALL),
    ),
    max_size=40,
)


@given(events=EVENTS)
@settings(max_examples=150, deadline=None)
def test_nobody_is_in_two_pairs_and_all_that_open_close(
    events: list[tuple[str, int, int]],
) -> None:
    pairs, open_now = made(), dict[str, LivePipeline]()

    def carry_out(todos: Iterable[PairTodo]) -> None:
        for todo in todos:
            if isinstance(todo, Close):
                del open_now[todo.pipeline_id]
            else:
                assert isinstance(todo, Grown) is (todo.pipeline.pipeline_id in open_now)
                open_now[todo.pipeline.pipeline_id] = todo.pipeline
        members = [stage.instance_id for one in open_now.values() for stage in one.stages]
        assert len(members) == len(set(members))

    for kind, number, bits in events:
        node = f"n{number}"
        match kind:
            case "begin":
                carry_out(pairs.begin(node, node, 0))
            case "holds":
                carry_out(pairs.holds(node, node, bits))
            case "ready":
                carry_out(pairs.ready(node, node))
            case "gone":
                carry_out(pairs.gone(node, node, "gone"))
            case "lost" if open_now:
                pair = next(iter(open_now.values()))
                del open_now[pair.pipeline_id]
                carry_out(pairs.lost(pair.pipeline_id, 0, pair.stages[number % 2].node, "lost"))
            case "sources":
                carry_out(pairs.sources({f"s{one}": f"m{one}" for one in range(4) if bits >> one & 1}))
    carry_out(pairs.sources({}))
    assert not open_now
