"""The load target by its laws: bounds, monotony, and that what it decides is enough."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.planning.policy import FunctionLoad, PolicyState
from gateway.planning.work import InstanceCapacity, StartForecast, finish_s, instances_for
from registry.records.function import ScaleDown
from tests.fixtures.load_target import CAPACITY, OUTPUT, PROMPT, decide, load

rates = st.floats(100, 1e6)
times = st.lists(st.floats(0, 30), min_size=1, max_size=20).map(sorted)


@given(st.integers(0, 10**6), rates, times, st.floats(0.01, 60), st.integers(1, 20))
def test_the_number_for_a_goal_is_the_least_that_reaches_it(
    tokens: int, rate: float, ready_s: list[float], goal_s: float, most: int
) -> None:
    count = instances_for(tokens, rate, ready_s, goal_s, most)
    assert 1 <= count <= min(most, len(ready_s))
    end_s = finish_s(tokens, rate, ready_s[:count])
    if count > 1:
        assert finish_s(tokens, rate, ready_s[: count - 1]) > goal_s
    if end_s > goal_s and count < min(most, len(ready_s)):
        assert ready_s[count] >= end_s  # a further one would be late
    done = sum(max(0.0, end_s - at) * rate for at in ready_s[:count])
    assert done == pytest.approx(tokens, rel=1e-6, abs=1e-3)


loads = st.builds(
    load,
    held=st.integers(0, 200),
    running=st.integers(0, 200),
    ready=st.integers(0, 12),
    starting=st.integers(0, 4),
    arrived=st.integers(0, 500),
    capacity=st.sampled_from([CAPACITY, InstanceCapacity(), replace(CAPACITY, kv_tokens=20_000)]),
    starts=st.builds(
        StartForecast,
        paused=st.integers(0, 2),
        hot=st.integers(0, 3),
        warm=st.integers(0, 3),
        warm_s=st.sampled_from([0.3, 2.0]),
        cold_s=st.sampled_from([2.0, 20.0]),
    ),
    service_s=st.sampled_from([None, 0.3, 4.0]),
    min_instances=st.integers(0, 2),
    max_instances=st.one_of(st.none(), st.integers(2, 6)),
    scale_down=st.sampled_from(ScaleDown),
    scale_down_delay_s=st.sampled_from([0.5, 2.0]),
    keep_alive_s=st.sampled_from([0.0, 1.0, 60.0]),
)


@given(st.lists(st.tuples(loads, st.floats(0, 20)), min_size=1, max_size=12))
def test_bounds_hold_and_a_decision_is_repeatable(steps: list[tuple[FunctionLoad, float]]) -> None:
    state, now = PolicyState(), 0.0
    for step, pause_s in steps:
        now += pause_s
        decision = decide(now, step, state)
        assert decision == decide(now, step, state)
        low = min(step.scaling.min_instances, step.cap)
        assert low <= decision.desired <= step.cap
        if step.in_flight + step.held and step.cap:
            assert decision.desired >= 1  # never below what has calls
        if decision.next_at is not None:
            assert decision.next_at > now
        state = decision.state


@given(loads, st.integers(0, 100), st.integers(0, 50))
def test_more_load_never_needs_fewer_instances(step: FunctionLoad, held: int, running: int) -> None:
    tokens = step.tokens
    more = replace(
        step,
        held=step.held + held,
        in_flight=step.in_flight + running,
        tokens=replace(
            tokens,
            held_tokens=tokens.held_tokens + held * PROMPT,
            kv_tokens=tokens.kv_tokens + (held + running) * (PROMPT + OUTPUT),
        ),
    )
    state = decide(0, step).state
    assert decide(0.1, more, state).desired >= decide(0.1, step, state).desired


@given(loads)
def test_what_is_decided_is_enough(step: FunctionLoad) -> None:
    """Once as many as decided are starting, no more are wanted."""
    first = decide(0, step)
    missing = first.desired - step.live
    if missing <= 0 or not step.capacity.prefill_tokens_s:
        return
    ready_s = list(zip(range(missing), step.starts.ready_s(), strict=False))
    started = replace(
        step,
        starting=step.starting + missing,
        starting_s=(*([step.starts.next_s] * step.starting), *(at for _, at in ready_s)),
        starts=StartForecast(cold_s=max([at for _, at in ready_s] + [step.starts.cold_s])),
    )
    assert decide(0, started, first.state).desired == first.desired
