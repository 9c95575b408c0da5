"""Which requests go to a version that is rolled out, how it is judged, and what follows. Pure."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.cluster.state_cache import ClusterStateCache, VersionKey
from gateway.core.contract import RolloutHealth
from gateway.planning.rollout_monitor import RolloutMonitor
from gateway.planning.rollouts import fault, lower_bound, next_action, step_ends_at
from registry.errors import Conflict, InvalidRecord, NotFound
from registry.records.change import CallTraffic, FunctionChanged, LoadReport, VersionLoad
from registry.records.function import Function, Scaling
from registry.records.rollout import (
    TRANSITIONS,
    Rollout,
    RolloutLimits,
    RolloutPlan,
    RolloutState,
    goes_to_candidate,
    is_shadowed,
)
from registry.records.rollout_changes import advance_rollout, begin_rollout, end_rollout, run_rollout
from tests.fixtures.control import make_version

HEAD = Function(name="f", current=1, versions=(1, 2, 3))
PLAN = RolloutPlan(candidate=2, percent=10)
RUNNING = Rollout(id="r", stable=1, plan=PLAN, started_at=100.0, since=100.0, state=RolloutState.RUNNING)


def served(ended: int, errors: int = 0, ttft_s: float = 0.0) -> CallTraffic:
    return CallTraffic(
        requests=ended,
        ended=ended,
        errors=errors,
        first_tokens=ended if ttft_s else 0,
        first_token_s=ended * ttft_s,
    )


# --- which requests


@given(st.sampled_from([0, 1, 10, 50, 99, 100]), st.sampled_from([0, 5, 100]))
def test_the_share_is_that_of_the_plan_and_an_id_keeps_its_version_as_it_grows(percent, more):
    plan = replace(PLAN, percent=percent, shadow_percent=percent)
    rollout = replace(RUNNING, plan=plan)
    grown = replace(rollout, plan=replace(plan, percent=min(100, percent + more)))
    ids = [f"req-{number:024x}" for number in range(4000)]
    there = {one for one in ids if goes_to_candidate(rollout, one)}
    assert abs(len(there) - 40 * percent) <= 130  # four standard deviations
    assert there <= {one for one in ids if goes_to_candidate(grown, one)}
    assert abs(sum(is_shadowed(rollout, one) for one in ids) - 40 * percent) <= 130
    if percent == 50:  # the draws are independent
        both = sum(is_shadowed(rollout, one) for one in there)
        assert abs(both - len(there) / 2) <= 100


def test_another_rollout_draws_other_requests():
    plan = replace(PLAN, percent=50)
    one, two = replace(RUNNING, plan=plan), replace(RUNNING, plan=plan, id="another")
    ids = [f"req-{number:024x}" for number in range(4000)]
    differs = sum(goes_to_candidate(one, id_) is not goes_to_candidate(two, id_) for id_ in ids)
    assert 1800 < differs < 2200


# --- the record


def test_a_rollout_begins_changes_and_ends():
    head = begin_rollout(HEAD, PLAN, id_="r", at=1.0)
    assert (head.current, head.candidate, head.served) == (1, 2, (1, 2))
    assert head.rollout is not None and head.rollout.state is RolloutState.STARTING
    assert not head.rollout.splits
    head = run_rollout(head, "r", at=2.0)
    assert head.rollout is not None and head.rollout.splits and head.rollout.since == 2.0
    assert run_rollout(head, "r", at=3.0) == head
    more = begin_rollout(head, replace(PLAN, percent=50), id_="unused", at=4.0)
    assert more.rollout == replace(head.rollout, plan=replace(PLAN, percent=50), since=4.0)
    with pytest.raises(Conflict, match="version 2 of f is being rolled out"):
        begin_rollout(head, replace(PLAN, candidate=3), id_="r2", at=5.0)
    done = end_rollout(head, "r", RolloutState.PROMOTED, "fine", at=6.0)
    assert (done.current, done.candidate, done.served) == (2, None, (2,))
    assert end_rollout(done, "r", RolloutState.PROMOTED, "again", at=7.0) == done  # a repetition
    with pytest.raises(Conflict, match="no rollout"):
        end_rollout(done, "r", RolloutState.ABORTED, "", at=7.0)
    back = end_rollout(head, "r", RolloutState.ROLLED_BACK, "x" * 1000, at=6.0)
    assert back.current == 1 and back.rollout is not None and len(back.rollout.reason) == 500
    with pytest.raises(Conflict, match="no rollout"):
        end_rollout(head, "another", RolloutState.ABORTED, "", at=7.0)


def test_what_cannot_be_rolled_out_is_refused():
    with pytest.raises(NotFound):
        begin_rollout(HEAD, replace(PLAN, candidate=9), id_="r", at=1.0)
    with pytest.raises(Conflict, match="the current one already"):
        begin_rollout(HEAD, replace(PLAN, candidate=1), id_="r", at=1.0)
    starting = begin_rollout(HEAD, PLAN, id_="r", at=1.0)
    with pytest.raises(Conflict, match="starting: it cannot be promoted"):
        end_rollout(starting, "r", RolloutState.PROMOTED, "", at=2.0)
    shares = ({"percent": 101}, {"shadow_percent": -1})
    for bad in (*shares, {"steps": (50, 10)}, {"steps": (0,)}, {"step_s": 0}):
        with pytest.raises(InvalidRecord):
            replace(PLAN, **bad)
    for bad in ({"max_error_rate": 2}, {"max_ttft_ratio": 0.5}, {"min_requests": 0}, {"window_s": 1}):
        with pytest.raises(InvalidRecord):
            replace(RolloutLimits(), **bad)


def test_final_states_are_final_and_every_state_has_a_row():
    assert set(TRANSITIONS) == set(RolloutState)
    final = {state for state, after in TRANSITIONS.items() if not after}
    assert final == {RolloutState.PROMOTED, RolloutState.ABORTED, RolloutState.ROLLED_BACK}
    assert all(not replace(RUNNING, state=state).is_active for state in final)


def test_the_candidate_always_has_an_instance_and_its_share_of_the_minimum():
    for least, percent, expected in ((0, 0, 1), (0, 10, 1), (10, 5, 1), (10, 25, 3), (10, 100, 10)):
        head = replace(HEAD, scaling=Scaling(min_instances=least, max_instances=12))
        head = begin_rollout(head, replace(PLAN, percent=percent), id_="r", at=1.0)
        assert head.candidate_scaling.min_instances == expected


# --- the judge


@pytest.mark.parametrize(
    ("ended", "errors", "of_stable", "bad"),
    [
        (4, 4, 0, False),  # too few requests
        (5, 5, 0, True),
        (5, 1, 0, False),  # one failure of five is no proof
        (20, 4, 0, True),
        (100, 9, 0, False),  # the bound of 9 % is below 5 %
        (100, 12, 0, True),
        (100, 12, 10, False),  # the stable version fails, too
        (100, 60, 10, True),
    ],
)
def test_it_is_judged_by_errors_beyond_those_of_the_stable_version(ended, errors, of_stable, bad):
    health = RolloutHealth(candidate=served(ended, errors), stable=served(100, of_stable), ready=1)
    assert bool(fault(RUNNING, health)) is bad
    action = next_action("f", RUNNING, health, 200.0)
    assert (action is not None) is bad
    if action is not None:
        assert (action.state, action.key) == (RolloutState.ROLLED_BACK, VersionKey("f", 2))
        assert f"{errors} of {ended} requests failed in 60 s" in action.reason


@given(st.integers(1, 200), st.integers(0, 200))
def test_the_lower_bound_is_below_the_rate_and_closer_for_more_requests(requests, errors):
    errors = min(errors, requests)
    bound = lower_bound(errors, requests)
    assert 0 <= bound <= errors / requests
    assert lower_bound(10 * errors, 10 * requests) >= bound


@pytest.mark.parametrize(
    ("candidate_s", "stable_s", "requests", "bad"),
    [
        (0.5, 0.1, 9, False),  # too few
        (0.5, 0.1, 10, True),
        (0.19, 0.1, 50, False),  # within twice
        (0.05, 0.01, 50, False),  # a difference of 40 ms is never judged
        (0.30, 0.1, 50, True),
    ],
)
def test_it_is_judged_by_the_time_to_first_token(candidate_s, stable_s, requests, bad):
    health = RolloutHealth(
        candidate=served(requests, ttft_s=candidate_s), stable=served(100, ttft_s=stable_s), ready=1
    )
    assert bool(fault(RUNNING, health)) is bad


def test_a_candidate_that_does_not_start_is_given_up():
    starting = replace(RUNNING, state=RolloutState.STARTING)
    broken = RolloutHealth(failed_starts=3, start_error="no such file")
    for rollout in (starting, RUNNING):
        action = next_action("f", rollout, broken, 200.0)
        assert action is not None and action.state is RolloutState.ROLLED_BACK
        assert "no such file" in action.reason
    assert next_action("f", starting, replace(broken, failed_starts=2), 200.0) is None
    assert next_action("f", RUNNING, replace(broken, ready=1), 200.0) is None
    action = next_action("f", starting, RolloutHealth(ready=1), 200.0)
    assert action is not None and (action.state, action.percent) == (RolloutState.RUNNING, None)


def test_steps_are_taken_in_good_health_after_their_time_and_the_last_promotes():
    plan = replace(PLAN, steps=(10, 50, 100), step_s=30)
    rollout, healthy = replace(RUNNING, plan=plan), RolloutHealth(candidate=served(50), ready=1)
    assert step_ends_at(rollout) == 130.0
    assert next_action("f", rollout, healthy, 129.0) is None
    action = next_action("f", rollout, healthy, 130.0)
    assert action is not None and (action.state, action.percent) == (RolloutState.RUNNING, 50)
    assert next_action("f", rollout, RolloutHealth(ready=1), 130.0) is None  # nothing shows that it is good
    last = replace(rollout, plan=replace(plan, percent=100))
    action = next_action("f", last, healthy, 130.0)
    assert action is not None and action.state is RolloutState.PROMOTED
    stays = replace(rollout, plan=replace(plan, percent=50, steps=(10, 50)))
    assert step_ends_at(stays) is None and next_action("f", stays, healthy, 1e9) is None
    assert next_action("f", RUNNING, healthy, 1e9) is None  # without steps an operator decides


def test_a_step_is_taken_once():
    head = replace(HEAD, rollout=replace(RUNNING, plan=replace(PLAN, steps=(10, 50, 100))))
    further = advance_rollout(head, "r", 50, at=7.0)
    assert further.rollout is not None and (further.rollout.plan.percent, further.rollout.since) == (50, 7.0)
    assert advance_rollout(further, "r", 50, at=8.0) == further  # of a controller that has lost its lease


# --- the monitor


def world(rollout: Rollout = RUNNING) -> ClusterStateCache:
    cache = ClusterStateCache()
    for number in (1, 2):
        head = replace(HEAD, rollout=rollout)
        cache.apply(FunctionChanged(function=head, version=make_version(version=number)), 0.0)
    return cache


def reported(*loads: tuple[int, CallTraffic]) -> LoadReport:
    return LoadReport(
        gateway="g2",
        loads=tuple(
            VersionLoad(function="f", version=number, in_flight=0, held=0, traffic=traffic)
            for number, traffic in loads
        ),
        ttl_s=10.0,
    )


def test_the_window_counts_all_gateways_and_only_what_is_recent():
    cache, monitor = world(), RolloutMonitor("g1")
    for second in range(200):
        own = {("f", 1): served(10 * second), ("f", 2): served(second, second // 2), ("g", 1): served(7)}
        monitor.update(cache, own, [reported((1, served(10 * second)), (2, served(second)))], float(second))
    health = monitor.health(cache, "f", RUNNING)
    assert abs(health.stable.ended - 20 * 60) <= 20 and abs(health.candidate.ended - 2 * 60) <= 2
    assert abs(health.candidate.errors - 30) <= 1


def test_what_was_served_before_the_rollout_does_not_count():
    cache, monitor = world(), RolloutMonitor("g1")
    monitor.update(cache, {("f", 1): served(5000, 100), ("f", 2): served(50, 50)}, [], 0.0)
    assert monitor.health(cache, "f", RUNNING).candidate == CallTraffic()
    monitor.update(cache, {("f", 1): served(5000, 100), ("f", 2): served(51, 51)}, [], 1.0)
    assert monitor.health(cache, "f", RUNNING).candidate == served(1, 1)
    again = replace(RUNNING, id="another")
    cache.apply(FunctionChanged(function=replace(HEAD, rollout=again), version=make_version()), 0.0)
    monitor.update(cache, {("f", 1): served(5000, 100), ("f", 2): served(51, 51)}, [], 2.0)
    assert monitor.health(cache, "f", again).candidate == CallTraffic()
    assert monitor.health(cache, "f", RUNNING) == RolloutHealth()
    over = replace(again, state=RolloutState.ABORTED)
    cache.apply(FunctionChanged(function=replace(HEAD, rollout=over), version=make_version()), 0.0)
    monitor.update(cache, {}, [], 3.0)
    assert monitor.health(cache, "f", over) == RolloutHealth() and cache.judged_versions() == []


def test_failed_starts_before_the_rollout_do_not_count():
    cache, monitor, key = world(), RolloutMonitor("g1"), VersionKey("f", 2)
    cache.backoff.log(key, "i0", "n0", "old")
    monitor.update(cache, {}, [], 0.0)
    cache.backoff.log(key, "i1", "n0", "new")
    health = monitor.health(cache, "f", RUNNING)
    assert (health.failed_starts, health.start_error) == (1, "new")
