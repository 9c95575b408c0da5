"""Which requests of a trace are sent."""

import pytest

from benchmarks.harness.traces import TraceRequest, read_trace
from benchmarks.trace.arrivals import bounds, burstiness, part_of, sample, spread
from benchmarks.trace.scenario import TRACES
from benchmarks.trace.synthetic import (
    LENGTH_S,
    OUTPUT_MEAN,
    OUTPUT_MEDIAN,
    PROMPT_MEAN,
    PROMPT_MEDIAN,
    RATE_PER_S,
    SYNTHETIC,
    bursty_trace,
    steady_trace,
)

TRACE = [TraceRequest(float(second), 100 + second, 10) for second in range(0, 601, 2)]


def test_a_part_is_timed_from_its_start_and_stays_within_its_half() -> None:
    from_s, part = part_of(TRACE, "second", 10.0, 60.0)
    assert from_s == 310.0 and bounds(TRACE, "second") == (300.0, pytest.approx(600.0))
    assert [one.offset_s for one in part] == [2.0 * place for place in range(30)]
    assert part[0].prompt_tokens == 410
    for half, last in (("first", 298.0), ("second", 600.0), ("whole", 600.0)):
        from_s, part = part_of(TRACE, half, 100.0, 3600.0)
        assert from_s + part[-1].offset_s == last
    with pytest.raises(ValueError, match="this part of the trace has 300 s"):
        part_of(TRACE, "first", 300.0, 60.0)


def test_halves_share_no_request() -> None:
    _, first = part_of(TRACE, "first", 0.0, 300.0)
    _, second = part_of(TRACE, "second", 0.0, 301.0)
    assert not {one.prompt_tokens for one in first} & {one.prompt_tokens for one in second}
    assert len(first) + len(second) == len(TRACE)


def test_a_sample_keeps_its_share_and_the_times() -> None:
    part = [TraceRequest(float(second), 1, 1) for second in range(4000)]
    kept = sample(part, 0.4, 7)
    assert 1500 < len(kept) < 1700 and set(kept) < set(part)
    assert kept == sample(part, 0.4, 7) != sample(part, 0.4, 8)
    assert sample(part, 1.0, 7) == part
    assert sample(part, 1e-9, 7) == part[:1]


def test_the_burstiest_part_is_found() -> None:
    burst = [TraceRequest(200.0 + place / 100, 1, 1) for place in range(300)]
    from_s, part = part_of(sorted([*TRACE, *burst], key=lambda one: one.offset_s), "first", "burst", 60.0)
    assert from_s <= 200.0 < from_s + 60.0
    assert burstiness([one.offset_s for one in part], 60.0) > 5 * burstiness(
        [one.offset_s for one in TRACE], 600.0
    )


def test_a_lone_request_of_an_idle_service_is_no_burst() -> None:
    busy = [TraceRequest(300.0 + place / 3, 1, 1) for place in range(600)]
    part = [
        TraceRequest(0.0, 1, 1),
        *busy,
        *(TraceRequest(400.0, 1, 1) for _ in range(50)),
        TraceRequest(700.0, 1, 1),
    ]
    from_s, _ = part_of(sorted(part, key=lambda one: one.offset_s), "whole", "burst", 60.0)
    assert from_s <= 400.0 < from_s + 60.0


def test_functions_share_the_requests_unevenly_and_always_the_same_way() -> None:
    shared = spread(TRACE, 12, seed=3)
    assert shared == spread(TRACE, 12, seed=3) != spread(TRACE, 12, seed=4)
    counts = [sum(one.function == place for one in shared) for place in range(12)]
    assert counts[0] == max(counts) and sum(counts) == len(TRACE)
    assert {one.function for one in spread(TRACE, 1, seed=3)} == {0}


def test_the_synthetic_trace_has_the_published_moments() -> None:
    trace = bursty_trace(1)
    assert trace == bursty_trace(1) != bursty_trace(2)
    assert len(trace) / LENGTH_S == pytest.approx(RATE_PER_S, rel=0.15)
    for values, mean, median in (
        ([one.prompt_tokens for one in trace], PROMPT_MEAN, PROMPT_MEDIAN),
        ([one.output_tokens for one in trace], OUTPUT_MEAN, OUTPUT_MEDIAN),
    ):
        assert sum(values) / len(values) == pytest.approx(mean, rel=0.05)
        assert sorted(values)[len(values) // 2] == pytest.approx(median, rel=0.05)
    azure = [one.offset_s for one in read_trace(TRACES["azure-conv"])]
    assert burstiness([one.offset_s for one in trace], LENGTH_S) > 2 * burstiness(azure, LENGTH_S)


def test_the_steady_trace_has_independent_arrivals_at_the_same_rate() -> None:
    trace = SYNTHETIC["synthetic-steady"](1)
    assert trace == steady_trace(1) != steady_trace(2)
    assert len(trace) / LENGTH_S == pytest.approx(RATE_PER_S, rel=0.02)
    per_bin = 5 * RATE_PER_S
    assert burstiness([one.offset_s for one in trace], LENGTH_S) == pytest.approx(1 / per_bin, rel=0.2)
