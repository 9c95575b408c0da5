"""ZigZag: the queue's laws, worked examples, and its latencies against the integer program."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from invoker.prefill.zigzag_queue import LayerWork, PromptBatch, ZigZagQueue
from tests.fixtures.zigzag_oracle import least_average_s
from tests.fixtures.zigzag_times import Relief, finish_times


def batches_of(*tokens: int) -> list[PromptBatch]:
    return [PromptBatch(name=f"r{place}", tokens=count) for place, count in enumerate(tokens)]


def case(rng: random.Random) -> tuple[list[PromptBatch], Relief]:
    layers = rng.randint(2, 6)
    batches = batches_of(*(rng.choice([1, 1, 2, 3, 4, 8]) for _ in range(rng.randint(2, 6))))
    mean = sum(batch.tokens for batch in batches) / len(batches)
    return batches, Relief(
        layers=layers,
        load_s=rng.uniform(0.2, 8) * mean,
        token_layer_s=1.0,
        source_free_s=rng.choice([0.0, 0.0, rng.uniform(0, layers * mean)]),
    )


def average_s(batches: list[PromptBatch], relief: Relief) -> float:
    ended = finish_times(batches, relief)
    assert sorted(ended) == sorted(batch.name for batch in batches)
    return sum(ended.values()) / len(batches)


def test_the_average_latency_is_near_the_optimum() -> None:
    rng = random.Random(20261122)
    ours, first_come, overtaking = [], [], []
    for _ in range(100):
        batches, relief = case(rng)
        ours.append(average_s(batches, relief))
        first_come.append(least_average_s(batches, relief))
        overtaking.append(least_average_s(batches, relief, overtaking=True))
    assert max(got / best for got, best in zip(ours, first_come, strict=True)) <= 1.1
    ratios = [got / best for got, best in zip(ours, overtaking, strict=True)]
    assert min(ratios) >= 1 - 1e-3  # no schedule is better than that optimum
    assert sum(ratios) / len(ratios) <= 1.1


def test_the_papers_example() -> None:
    """Seven layers, a load of six: waiting for the second layer brings the last request's end far forward."""
    relief = Relief(layers=7, load_s=6.0, token_layer_s=1.0, source_free_s=1.0)
    ended = finish_times(batches_of(1, 1, 1, 1, 1, 1), relief)
    assert ended["r0"] == 7.0  # one layer on the target, six on the source
    best_effort = 1 + 6 * 6  # each request with the one layer that was there when it was started
    assert ended["r5"] <= best_effort - 6


@pytest.mark.parametrize("loaded", [4, 5, 8])
def test_a_half_loaded_target_relieves_its_source(loaded: int) -> None:
    """Of 8 layers: with half of them there the pair serves about twice what the source serves alone."""
    queue, ends = ZigZagQueue(8), []
    queue.set_loaded_layers(loaded)
    waiting = iter(range(1000))
    for _ in range(6):
        queue.add(PromptBatch(name=f"r{next(waiting)}", tokens=1))
    free_at = {"target": 0.0, "source": 0.0}
    running: dict[str, LayerWork | None] = {"target": None, "source": None}
    now = 0.0
    while now < 400:
        for who, work in running.items():
            if work is None or free_at[who] > now:
                continue
            running[who] = None
            if who == "source" or queue.complete(work):
                ends.append(now)
                queue.add(PromptBatch(name=f"r{next(waiting)}", tokens=1))
        for who, ask in (("source", queue.pop_for_source), ("target", queue.next_for_target)):
            if running[who] is None and (got := ask()) is not None:
                running[who], free_at[who] = got, now + got.last - got.first
        now = min(free_at[who] for who, work in running.items() if work is not None)
    alone = 400 / 8
    assert len(ends) >= 1.6 * alone


def test_the_earliest_with_a_loaded_layer_comes_first() -> None:
    queue = ZigZagQueue(3)
    first, second = batches_of(5, 7)
    queue.add(first)
    assert queue.next_for_target() is None  # no layer is there yet
    queue.add(second)
    queue.set_loaded_layers(1)
    work = queue.next_for_target()
    assert work == LayerWork(batch=first, first=0, last=1)
    assert queue.pop_for_source() is None  # the earliest is running: one layer is not long
    other = queue.next_for_target()
    assert other == LayerWork(batch=second, first=0, last=1)
    assert not queue.complete(work) and not queue.complete(other)
    assert queue.next_for_target() is None
    queue.set_loaded_layers(2)
    again = queue.next_for_target()
    assert again == LayerWork(batch=first, first=1, last=2)
    assert repr(queue) == "<ZigZagQueue [0,2) of 3 loaded: r0 1+, r1 1>"
    assert not queue.complete(again)
    assert queue.pop_for_source() == LayerWork(batch=first, first=2, last=3)
    assert queue.pop_for_source() == LayerWork(batch=second, first=1, last=3)
    assert queue.pop_for_source() is None and len(queue) == 0


def test_one_that_is_dropped_while_it_runs_is_gone() -> None:
    queue = ZigZagQueue(2)
    (only,) = batches_of(1)
    queue.add(only)
    with pytest.raises(ValueError, match="already"):
        queue.add(only)
    queue.set_loaded_layers(2)
    work = queue.next_for_target()
    assert work is not None
    queue.drop(only.name)
    assert not queue.complete(work)
    assert queue.pop_for_source() is None


@given(
    tokens=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    layers=st.integers(1, 9),
    load_s=st.floats(0.0, 30.0),
    source_free_s=st.floats(0.0, 40.0),
)
@settings(max_examples=200)
def test_all_end_and_no_sooner_than_work_allows(
    tokens: list[int], layers: int, load_s: float, source_free_s: float
) -> None:
    relief = Relief(layers=layers, load_s=load_s, token_layer_s=1.0, source_free_s=source_free_s)
    ended = finish_times(batches_of(*tokens), relief)
    assert len(ended) == len(tokens)
    total = sum(tokens) * layers
    last = max(ended.values())
    assert last >= total / 2 - 1e-6
    assert last <= source_free_s + total + 1e-6  # never later than the source alone, if it did nothing else
    assert finish_times(batches_of(*tokens), relief, until_s=last) == ended


@given(
    layers=st.integers(1, 6),
    count=st.integers(1, 6),
    moves=st.lists(st.sampled_from(["load", "target", "ran", "source"]), max_size=60),
)
@settings(max_examples=150)
def test_each_layer_of_each_batch_runs_once(layers: int, count: int, moves: list[str]) -> None:
    queue, done = ZigZagQueue(layers), {f"r{place}": 0 for place in range(count)}
    for batch in batches_of(*[1] * count):
        queue.add(batch)
    running: list[LayerWork] = []
    loaded = 0
    for move in [*moves, *["ran", "source"] * (count + len(moves))]:
        if move == "load":
            loaded += 1
            queue.set_loaded_layers(loaded)
        elif move == "ran":
            if running:
                queue.complete(running.pop(0))
        elif (work := (queue.next_for_target if move == "target" else queue.pop_for_source)()) is not None:
            assert work.first == done[work.batch.name] < work.last
            done[work.batch.name] = work.last
            running += [work] if move == "target" else []
    assert set(done.values()) == {layers} and len(queue) == 0
