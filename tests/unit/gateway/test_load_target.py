"""The load target by examples, where a rule has a number."""

from dataclasses import replace
from typing import Any

import pytest

from gateway.planning.load_target import PolicyBySetting
from gateway.planning.policy import PolicyState, ScalingDecision, with_target
from gateway.planning.roles import RoleNeed
from gateway.planning.work import InstanceCapacity, StartForecast
from registry.records.function import ScaleDown, Scaling, ScalingMode, ServingMode
from tests.fixtures.load_target import CAPACITY, PROMPT, decide, load


def test_several_instances_in_one_step_by_what_waits() -> None:
    assert decide(0, load(held=7)).desired == 1  # 0.35 s of work, within a third of the target
    assert decide(0, load(held=40, starts=StartForecast(hot=9, hot_s=0.0))).desired == 6  # 2 s of it
    burst = decide(0, load(held=70, starts=StartForecast(hot=11, hot_s=0.0)))
    assert burst.desired == 10
    assert "70000 prompt tokens wait at 20000/s each: a wait of 3.5 s, target 1 s" in burst.reason


def test_instances_that_start_count_and_are_not_started_again() -> None:
    first = decide(0, load(held=40))
    again = decide(0.1, load(held=40, starting=first.desired - 1), first.state)
    assert again.desired == first.desired > 1


def test_none_is_started_that_would_be_ready_only_when_the_wait_is_over() -> None:
    slow = StartForecast(cold_s=4.0)
    assert decide(0, load(held=40, starts=slow)).desired == 1  # 2 s of work
    assert decide(0, load(held=90, starts=slow)).desired == 2  # 4.5 s
    assert decide(0, load(held=40, ready=0, starts=slow)).desired >= 1  # or it would wait for ever


def test_what_arrives_while_a_start_takes_counts() -> None:
    state, arrived = PolicyState(), 0
    desired = 1
    for at in range(30):  # 50 prompts a second for one instance that runs 20
        arrived += 5
        decision = decide(at / 10, load(held=4, running=8, arrived=arrived), state)
        state, desired = decision.state, max(desired, decision.desired)
    assert desired == 2


def test_before_anything_was_seen_the_concurrency_counts_and_the_reason_says_so() -> None:
    decision = decide(0, load(held=20, ready=0, capacity=InstanceCapacity()))
    assert (decision.desired, decision.reason) == (
        3,
        "20 calls at 8 each, as no instance was seen at work yet",
    )
    one = decide(0, load(held=1, ready=0, capacity=InstanceCapacity()))
    assert one.reason == "1 call at 8 each, as no instance was seen at work yet"


def test_sequences_beyond_the_time_between_tokens_and_the_kv_cache() -> None:
    slow = replace(CAPACITY, decode_steps=((1, 0.05), (8, 0.15), (16, 0.3)))
    assert decide(0, load(running=24, capacity=slow, tbt_target_s=0.2)).desired == 3
    assert "sequences, 8 each within 0.2 s a token" in decide(0, load(running=24, capacity=slow)).reason
    # 60 calls of 1200 tokens; those queued wait for others to end, which takes a while.
    small = replace(CAPACITY, kv_tokens=20_000)
    held = decide(0, load(held=20, running=40, ready=2, capacity=small, ttft_target_s=4.0))
    assert held.desired == 3 and "tokens of KV cache, 20000 each" in held.reason
    # Instances whose KV cache is nearly full get help even if nothing is queued.
    full = replace(CAPACITY, kv_used_tokens=59_000)
    assert decide(0, load(running=40, capacity=full)).desired == 2


def test_the_share_of_the_kv_cache_that_is_used_counts_once() -> None:
    """Calls of 9500 tokens fit into 10,000, of which 95 % are used; one token more does not."""
    known = load(held=1, running=7, service_s=None, capacity=replace(CAPACITY, kv_tokens=10_000))
    for kv_tokens, desired in ((9500, 1), (9501, 2)):
        by_calls = replace(known, tokens=replace(known.tokens, kv_tokens=kv_tokens))
        assert decide(0, by_calls).desired == desired
        used = replace(known.capacity, kv_used_tokens=kv_tokens)
        in_use = replace(known, capacity=used, tokens=replace(known.tokens, kv_tokens=100))
        assert decide(0, in_use).desired == desired


def test_a_call_of_a_gateway_that_reports_no_tokens_counts_by_the_concurrency() -> None:
    known = load(running=4)
    old = replace(known, in_flight=44, tokens=replace(known.tokens, uncounted=40))
    assert decide(0, old).desired == 5


def test_down_after_the_delay_and_the_last_one_after_keep_alive() -> None:
    settings: dict[str, Any] = {"scale_down_delay_s": 0.5, "keep_alive_s": 30.0}
    decision = decide(0, load(running=1, ready=4, **settings))
    assert (decision.desired, decision.next_at) == (4, 0.5)
    decision = decide(0.5, load(running=1, ready=4, **settings), decision.state)
    assert decision.desired == 1
    idle = decide(10, load(ready=1, **settings), decision.state)
    assert (idle.desired, idle.next_at) == (1, 40)
    assert decide(39.9, load(ready=1, **settings), idle.state).desired == 1
    assert decide(40, load(ready=1, **settings), idle.state).desired == 0


@pytest.mark.parametrize(
    ("starts", "kept_s"),
    [
        (StartForecast(hot=1, hot_s=0.01), 0.2),  # at least
        (StartForecast(warm=1, warm_s=0.7), 0.7),
        (StartForecast(cold_s=5.0), 5.0),
        (StartForecast(paused=1, cold_s=5.0), 5.0),  # it may be needed as well
        (StartForecast(cold_s=90.0), 30.0),  # the keep-alive
    ],
)
def test_a_surplus_is_kept_for_as_long_as_a_further_start_would_take(
    starts: StartForecast, kept_s: float
) -> None:
    settings: dict[str, Any] = {"scale_down": ScaleDown.START, "keep_alive_s": 30.0, "starts": starts}
    decision = decide(0, load(running=1, ready=4, **settings))
    assert (decision.desired, decision.next_at) == (4, kept_s)
    before = decide(kept_s - 0.01, load(running=1, ready=4, **settings), decision.state)
    assert before.desired == 4 and f"needed within {kept_s:g} s" in before.reason
    assert decide(kept_s, load(running=1, ready=4, **settings), before.state).desired == 1


def test_what_was_stopped_and_soon_needed_again_is_kept_no_longer_than_its_start_takes() -> None:
    starts = StartForecast(hot=3, hot_s=0.01)
    settings: dict[str, Any] = {"scale_down": ScaleDown.START, "keep_alive_s": 30.0, "starts": starts}
    state, now = PolicyState(), 0.0
    for _ in range(5):
        raised = decide(now, load(held=30, running=20, ready=2, **settings), state)
        assert raised.desired > 2
        calm = decide(now + 0.1, load(running=1, ready=raised.desired, **settings), raised.state)
        lowered = decide(now + 0.35, load(running=1, ready=raised.desired, **settings), calm.state)
        assert (calm.desired, lowered.desired) == (raised.desired, 1)
        state, now = lowered.state, now + 1.0


def test_starts_of_an_earlier_controller_are_completed_and_kept_as_if_they_were_its_own() -> None:
    found = decide(0.0, load(ready=1, starting=4))
    assert found.desired == 5
    later = decide(10.0, load(ready=1, starting=4), found.state)
    assert later.desired == 5
    ready = decide(20.0, load(ready=5), later.state)
    assert ready.desired == 5
    assert decide(79.9, load(ready=5), ready.state).desired == 5  # for keep_alive, a minute
    assert decide(80.1, load(ready=5), ready.state).desired < 5


def test_what_was_started_before_does_not_hold_for_ever_if_a_start_is_lost() -> None:
    found = decide(0.0, load(ready=3, starting=1, nodes=4, keep_alive_s=10.0))
    assert found.desired == 4
    lost = decide(1.0, load(ready=3, nodes=3, keep_alive_s=10.0), found.state)
    assert lost.desired == 3
    assert decide(11.1, load(ready=3, nodes=3, keep_alive_s=10.0), lost.state).desired == 0


@pytest.mark.parametrize("policy", list(ScalingMode))
def test_an_operators_number_beyond_the_maximum_ends_with_keep_alive(policy: ScalingMode) -> None:
    by_setting, state = PolicyBySetting(), PolicyState(floor=4)
    step = replace(load(ready=2), scaling=Scaling(policy=policy, max_instances=2))
    for now, desired in ((0.0, 2), (59.0, 2), (121.0, 0)):
        decision = by_setting.decide(step, state, now)
        state = decision.state
        assert decision.desired == desired


@pytest.mark.parametrize("gap_s", [10.0, 60.0, 3600.0])
def test_what_arrives_while_nothing_is_decided_is_no_burst(gap_s: float) -> None:
    """Four prompts a second for one instance that runs twenty."""
    state, now, arrived = PolicyState(), 0.0, 0
    for _ in range(100):
        now, arrived = now + 0.25, arrived + 1
        state = decide(now, load(running=4, arrived=arrived), state).state
    later = decide(now + gap_s, load(running=4, arrived=arrived + int(4 * gap_s)), state)
    assert later.desired == 1
    trend = later.state.trend
    assert trend is not None and trend.short == pytest.approx(4 * PROMPT, rel=0.1)


def test_a_need_within_the_window_keeps_what_it_needed() -> None:
    state = PolicyState()
    seen = []
    for at, held in ((0.0, 0), (1.0, 45), (1.5, 0), (2.9, 0), (3.1, 0)):
        decision = decide(at, load(held=held, running=1, ready=3, starts=StartForecast(cold_s=0.1)), state)
        state = decision.state
        seen.append(decision.desired)
    assert seen == [3, 4, 3, 3, 1]


def test_a_short_peak_drains_without_help_and_a_growing_one_gets_it() -> None:
    """Half a second of work: for one instance at a rate of 5 prompts a second, and of 50."""
    for per_step, helped in ((0.5, False), (5, True)):
        state = PolicyState()
        for at in range(1, 31):
            arrived = int(at * per_step)
            held = 10 if at == 30 else 0
            decision = decide(at / 10, load(held=held, running=4, arrived=arrived), state)
            state = decision.state
        assert (decision.desired > 1) is helped


def test_what_was_stopped_too_early_is_kept_for_the_keep_alive_but_no_rare_peak() -> None:
    settings: dict[str, Any] = {"scale_down_delay_s": 2.0, "keep_alive_s": 30.0}
    busy, quiet = {"held": 30, "running": 20}, {"running": 1}

    def after(at: float, ready: int, calls: dict[str, int], state: PolicyState) -> ScalingDecision:
        return decide(at, load(**calls, ready=ready, starts=StartForecast(cold_s=0.1), **settings), state)

    first = after(0, 2, busy, PolicyState())
    assert first.desired > 2
    stopped = after(2.1, 2, quiet, first.state)
    assert stopped.desired == 1
    again = after(10, 1, busy, stopped.state)
    assert again.desired > 2  # all that the peak needs
    for at in (12.1, 39.9):
        kept = after(at, again.desired, quiet, again.state)
        assert kept.desired == 2 and "2 needed within 30 s" in kept.reason  # one more than was too few
    assert after(40.1, 2, quiet, again.state).desired == 1
    # Idle instances stay for the keep-alive only.
    idle = after(15, 2, {}, again.state)
    assert after(45.1, 2, {}, idle.state).desired == 0


def test_an_operators_number_and_sleep() -> None:
    assert decide(0, load(running=1, ready=5), with_target(PolicyState(), 2)).desired == 2
    asleep = decide(0, load(running=1, ready=2, min_instances=1), with_target(PolicyState(), 0))
    assert asleep.desired == 0
    woken = decide(1, load(held=1, ready=0, min_instances=1), asleep.state)
    assert woken.desired == 1


def test_the_setting_chooses_the_policy() -> None:
    by_load, policy = load(running=20), PolicyBySetting()
    by_calls = replace(by_load, scaling=Scaling())
    assert policy.decide(by_load, PolicyState(), 0).desired == 1
    assert policy.decide(by_calls, PolicyState(), 0).desired == 3


def test_decode_steps_are_extrapolated() -> None:
    assert InstanceCapacity().max_decodes(0.2) == float("inf")
    assert InstanceCapacity(decode_steps=((1, 0.01),)).max_decodes(0.2) == float("inf")
    assert InstanceCapacity(decode_steps=((1, 0.01), (11, 0.02))).max_decodes(0.2) == pytest.approx(191)
    assert InstanceCapacity(decode_steps=((1, 0.3),)).max_decodes(0.2) == 1


def test_the_pools_of_a_disaggregated_function_scale_apart() -> None:
    slow = replace(CAPACITY, decode_steps=((1, 0.05), (8, 0.15), (16, 0.3)))
    settings: dict[str, Any] = {"capacity": slow, "serving": ServingMode.DISAGGREGATED}
    hot = StartForecast(hot=30, hot_s=0.0)
    decodes = decide(0, load(running=24, starts=hot, **settings))
    assert decodes.roles == RoleNeed(prefill=1, decode=3) and decodes.desired == 4
    both = decide(0, load(held=20, running=24, starts=hot, **settings))
    assert both.roles is not None and both.roles.prefill > 1 and both.roles.decode >= 3
    assert both.desired > both.roles.prefill + both.roles.decode, "some are started for what is yet to come"
    assert "for prompts" in both.reason and "to decode" in both.reason
    assert decide(0, load(running=1, **settings)).desired == 1, "one instance is enough for both"


def test_a_long_queue_of_prompts_leaves_instances_to_run_it() -> None:
    hot = StartForecast(hot=30, hot_s=0.0)
    found = decide(0, load(held=400, running=10, starts=hot, serving=ServingMode.DISAGGREGATED))
    alone = decide(0, load(running=10, starts=hot, serving=ServingMode.DISAGGREGATED))
    assert found.roles is not None and alone.roles is not None
    assert found.roles.decode == alone.roles.decode and found.roles.prefill > 10
    waiting = decide(0, load(held=5, starts=hot, serving=ServingMode.DISAGGREGATED))
    assert waiting.roles is not None and waiting.roles.decode == 1


def test_decode_instances_run_prompts_where_no_further_one_may_be_started() -> None:
    full = load(held=60, running=8, ready=8, max_instances=8, serving=ServingMode.DISAGGREGATED)
    found = decide(0, replace(full, prefilling=1))
    assert found.desired == 8 and found.roles is not None
    assert found.roles.prefill > 4 and found.roles.decode == 1
