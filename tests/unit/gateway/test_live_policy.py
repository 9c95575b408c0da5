"""When a function goes live: the rule, its reasons and its laws."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.live.policy import LiveDecision, LiveForecast, decide_live
from gateway.planning.work import InstanceCapacity, TokenLoad, queue_wait_s
from registry.records.live import LiveMode

SECONDS = st.one_of(st.floats(0.0, 100.0), st.just(inf))
FORECASTS = st.builds(
    LiveForecast,
    plain_s=SECONDS,
    pipeline_s=SECONDS,
    zigzag_s=SECONDS,
    queued=st.integers(0, 100),
    can_grow=st.booleans(),
)
TARGETS = st.floats(0.01, 100.0)


def given_s(plain_s: float, pipeline_s: float = inf, **more: object) -> LiveForecast:
    return LiveForecast(plain_s=plain_s, pipeline_s=pipeline_s, **more)


@pytest.mark.parametrize(
    ("setting", "forecast", "way", "reason"),
    [
        ("off", given_s(9.0, 1.0), "off", "live is off"),
        ("pipeline", given_s(0.1, 0.05), "pipeline", "live is pipeline"),
        (
            "pipeline",
            given_s(9.0),
            "off",
            "live is pipeline, but no loading nodes will hold all layers between them",
        ),
        ("pipeline", given_s(9.0, can_grow=True), "pipeline", "live is pipeline"),
        (
            "auto",
            given_s(9.0, can_grow=True),
            "pipeline",
            "a call waits 9.00 s, TTFT; nodes that load later can join it",
        ),
        ("zigzag", given_s(9.0, 1.0), "off", "live is zigzag, but no ready instance is overloaded"),
        ("zigzag", given_s(8.0, 1.0, zigzag_s=4.0), "zigzag", "live is zigzag"),
        ("auto", given_s(0.5, 0.1), "off", "a call waits 500.0 ms, TTFT"),
        ("auto", given_s(0.7, 0.1, queued=3), "off", "3 queued calls wait 700.0 ms, TTFT"),
        (
            "auto",
            given_s(5.0, 0.1, queued=30, basis="8 MB"),
            "pipeline",
            "30 queued calls wait 5.00 s, TTFT (8 MB); pipeline takes 100.0 ms",
        ),
        (
            "auto",
            given_s(2.0, 1.5, zigzag_s=1.2),
            "zigzag",
            "a call waits 2.00 s, TTFT; zigzag takes 1.20 s, pipeline 1.50 s",
        ),
        (
            "auto",
            given_s(2.0, 1.9, zigzag_s=1.95),
            "off",
            "a call waits 2.00 s, TTFT; no sooner live: pipeline takes 1.90 s, zigzag 1.95 s",
        ),
        ("auto", given_s(2.0), "off", "a call waits 2.00 s, TTFT; no live mode is possible"),
        ("auto", given_s(inf, 2.5), "pipeline", "a call waits forever, TTFT; pipeline takes 2.50 s"),
    ],
)
def test_decisions_and_their_reasons(setting: str, forecast: LiveForecast, way: str, reason: str) -> None:
    """With a target of 1 s."""
    reason = reason.replace("TTFT", "the TTFT target is 1.00 s")
    decision = decide_live(LiveMode(setting), forecast, 1.0)
    assert decision == LiveDecision(
        way=LiveMode(way), reason=f"auto: {reason}" if setting == "auto" else reason
    )


@given(forecast=FORECASTS, target_s=TARGETS)
@example(forecast=LiveForecast(plain_s=1.4, pipeline_s=1.0, zigzag_s=inf), target_s=0.5)
@example(forecast=LiveForecast(plain_s=1.6, pipeline_s=1.0, zigzag_s=inf), target_s=0.5)
def test_auto_goes_live_only_for_the_target_and_only_where_it_helps(
    forecast: LiveForecast, target_s: float
) -> None:
    decision = decide_live(LiveMode.AUTO, forecast, target_s)
    assert decision.way is not LiveMode.AUTO and "\n" not in decision.reason
    best_s = min(forecast.live_s(LiveMode.PIPELINE), forecast.live_s(LiveMode.ZIGZAG))
    if forecast.plain_s <= target_s:
        assert not decision.is_live
    elif best_s * 1.5 < forecast.plain_s:
        assert decision.is_live and forecast.live_s(decision.way) == best_s
    else:
        assert decision.is_live == forecast.can_grow


@given(forecast=FORECASTS, setting=st.sampled_from([LiveMode.PIPELINE, LiveMode.ZIGZAG]))
def test_a_fixed_mode_is_taken_wherever_it_is_possible(forecast: LiveForecast, setting: LiveMode) -> None:
    can = {LiveMode.PIPELINE: forecast.pipeline_s, LiveMode.ZIGZAG: forecast.zigzag_s}[setting] < inf
    can = can or (setting is LiveMode.PIPELINE and forecast.can_grow)
    assert decide_live(setting, forecast, 1.0).way is (setting if can else LiveMode.OFF)


def wait_s(queued: int, running: int, slots: int, service_s: float | None) -> float:
    """Return the wait for one instance (none without slots) of which no prompts were seen."""
    tokens, capacity = TokenLoad(service_s=service_s), InstanceCapacity(slots=slots)
    return queue_wait_s(tokens, capacity, queued=queued, running=running, ready=min(1, slots))


@given(settings=st.lists(st.tuples(st.sampled_from(LiveMode), FORECASTS), min_size=1), target_s=TARGETS)
def test_a_decision_never_flaps_and_off_is_off(
    settings: list[tuple[LiveMode, LiveForecast]], target_s: float
) -> None:
    before: LiveDecision | None = None
    for setting, forecast in settings:
        decision = decide_live(setting, forecast, target_s, before)
        if setting is LiveMode.OFF:
            assert decision.way is LiveMode.OFF
        elif before is not None and before.is_live:
            assert decision == before
        before = decision


@pytest.mark.parametrize(
    ("queued", "running", "slots", "service_s", "expected_s"),
    [
        (0, 8, 8, None, 0.0),
        (0, 0, 0, 1.0, inf),
        (4, 8, 8, None, inf),
        (16, 8, 8, 0.5, 1.5),
        (4, 8, 0, 0.5, inf),
    ],
)
def test_the_queue_waits_for_the_throughput_of_ready_instances(
    queued: int, running: int, slots: int, service_s: float | None, expected_s: float
) -> None:
    assert wait_s(queued, running, slots, service_s) == expected_s


def test_where_prompts_were_seen_their_tokens_count_as_for_scaling() -> None:
    tokens = TokenLoad(held_tokens=30_000, prefilling_tokens=10_000, kv_tokens=60_000, service_s=4.0)
    seen = InstanceCapacity(prefill_tokens_s=20_000.0, slots=64, kv_tokens=60_000)
    calls = {"queued": 30, "running": 10}
    assert queue_wait_s(tokens, seen, **calls, ready=1) == 2.0
    assert queue_wait_s(tokens, seen, **calls, ready=2) == 1.0
    # A slot or KV cache that others have first: a third of the calls waits for their usual time.
    assert queue_wait_s(tokens, replace(seen, slots=16), **calls, ready=1) == pytest.approx(6.0)
    assert queue_wait_s(tokens, replace(seen, kv_tokens=24_000), **calls, ready=1) == pytest.approx(6.0)
    unknown = replace(tokens, service_s=None)
    assert queue_wait_s(unknown, replace(seen, slots=16), **calls, ready=1) == inf
