"""The concurrency target: examples where a rule has a number, properties where it is a law."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.planning.policy import ConcurrencyTarget, FunctionLoad, PolicyState, ScalingDecision, with_target
from registry.records.function import Scaling

POLICY = ConcurrencyTarget(stable_s=30.0)


def load(
    calls: int = 0, *, held: int = 0, ready: int = 0, starting: int = 0, nodes: int = 8, **scaling: float
) -> FunctionLoad:
    settings = {"target_concurrency": 4, "keep_alive_s": 60.0} | scaling
    return FunctionLoad(
        in_flight=calls, held=held, ready=ready, starting=starting, nodes=nodes, scaling=Scaling(**settings)
    )


def run(steps: list[tuple[float, FunctionLoad]], memory: PolicyState | None = None) -> list[ScalingDecision]:
    memory, decisions = memory or PolicyState(), []
    for now, step in steps:
        decisions.append(POLICY.decide(step, memory, now))
        memory = decisions[-1].state
    return decisions


def test_several_instances_in_one_step_and_starting_ones_count() -> None:
    assert POLICY.decide(load(held=200, max_instances=5), PolicyState(), 0).desired == 5
    assert POLICY.decide(load(held=200), PolicyState(), 0).desired == 8
    assert POLICY.decide(load(held=9), PolicyState(), 0).desired == 3
    assert POLICY.decide(load(held=9, starting=3), PolicyState(), 0).desired == 3


def test_to_zero_after_keep_alive_of_idleness() -> None:
    first, before, after = run([(0, load(ready=1)), (59, load(ready=1)), (60, load(ready=1))])
    assert (first.desired, first.next_at) == (1, 60)
    assert before.desired == 1
    assert after.desired == 0


def test_a_call_starts_the_keep_alive_anew() -> None:
    decisions = run([(0, load(ready=1)), (50, load(1, ready=1)), (55, load(ready=1)), (114, load(ready=1))])
    assert [d.desired for d in decisions] == [1, 1, 1, 1]
    assert decisions[-1].next_at == 115


def test_down_to_the_peak_of_the_stable_window_under_load() -> None:
    decisions = run(
        [(0, load(4, ready=3)), (10, load(8, ready=3)), (20, load(4, ready=3)), (30, load(4, ready=3))]
    )
    assert [d.desired for d in decisions] == [3, 3, 3, 2]


def test_time_of_starting_is_not_idle_time() -> None:
    decisions = run(
        [(0, load(starting=1)), (500, load(starting=1)), (501, load(ready=1)), (560, load(ready=1))]
    )
    assert [d.desired for d in decisions] == [1, 1, 1, 1]


def test_an_operators_number_is_set_once_and_kept_alive() -> None:
    memory = with_target(PolicyState(), 3)
    decisions = run(
        [
            (0, load()),
            (5, load(ready=1, starting=2)),
            (10, load(ready=3)),
            (69, load(ready=3)),
            (70, load(ready=3)),
        ],
        memory,
    )
    assert [d.desired for d in decisions] == [3, 3, 3, 3, 0]


def test_scaled_to_zero_it_sleeps_until_the_next_call() -> None:
    memory = with_target(PolicyState(), 0)
    decisions = run(
        [
            (0, load(2, ready=2, min_instances=1)),
            (1, load(1, min_instances=1)),
            (2, load(min_instances=1)),
            (3, load(held=1, min_instances=1)),
            (4, load(ready=1, min_instances=1)),
        ],
        memory,
    )
    assert [d.desired for d in decisions] == [0, 0, 0, 1, 1]


def test_scaling_down_by_hand_acts_at_once() -> None:
    assert POLICY.decide(load(ready=5), with_target(PolicyState(), 2), 0).desired == 2


settings = st.builds(
    Scaling,
    min_instances=st.integers(0, 2),
    max_instances=st.one_of(st.none(), st.integers(2, 6)),
    target_concurrency=st.integers(1, 16),
    keep_alive_s=st.sampled_from([0.0, 1.0, 60.0]),
)


@given(
    settings,
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60), st.floats(0, 90)), min_size=1, max_size=30),
    st.integers(0, 8),
)
def test_never_above_the_maximum_and_never_more_starts_than_needed(
    scaling: Scaling, steps: list[tuple[int, int, float]], nodes: int
) -> None:
    memory, now, ready, starting = PolicyState(), 0.0, 0, 0
    for in_flight, held, pause_s in steps:
        now += pause_s
        ready, starting = ready + starting, 0  # what was starting became ready
        state = FunctionLoad(
            in_flight=in_flight, held=held, ready=ready, starting=starting, nodes=nodes, scaling=scaling
        )
        decision = POLICY.decide(state, memory, now)
        assert decision == POLICY.decide(state, memory, now)
        memory = decision.state
        assert 0 <= decision.desired <= (nodes if scaling.max_instances is None else scaling.max_instances)
        need = max(-(-(in_flight + held) // scaling.target_concurrency), scaling.min_instances)
        if decision.desired > ready:
            assert decision.desired <= need
            starting = decision.desired - ready
        elif decision.desired < ready:
            ready = decision.desired
        if decision.next_at is not None:
            assert decision.next_at >= now


@given(settings, st.integers(0, 60), st.integers(1, 8), st.integers(0, 8))
def test_constant_load_settles_and_stays(scaling: Scaling, calls: int, nodes: int, live: int) -> None:
    memory, now = PolicyState(), 0.0
    seen = []
    ready = min(live, scaling.max_instances or nodes, nodes)
    for _ in range(20):
        state = FunctionLoad(in_flight=calls, held=0, ready=ready, starting=0, nodes=nodes, scaling=scaling)
        decision = POLICY.decide(state, memory, now)
        memory, ready = decision.state, decision.desired
        seen.append(ready)
        now = decision.next_at if decision.next_at is not None else now + 7.0
    falling = sorted(seen[1:], reverse=True)
    assert seen[1:] == falling  # one step up at most, then only down
    assert len(set(seen[5:])) == 1
