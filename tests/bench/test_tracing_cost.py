"""What is made of the measurements of the cost of traces."""

import pytest

from benchmarks.tracing_cost import collector, parse, records, show, variants


def test_the_cost_is_against_the_load_of_the_same_round() -> None:
    # The machine is half as fast in the second round.
    found = {"off": [1000.0, 500.0, 1000.0], "traced-20": [980.0, 490.0, 990.0]}
    off, traced = records(found)
    assert (off["ratio"], off["cost"]) == (1.0, 0.0)
    assert traced["ratio"] == pytest.approx(0.98) and traced["cost"] == pytest.approx(0.02)
    assert "0.980 of off (0.980 to 0.990): +2.0%" in show(traced)


def test_platforms_differ_in_what_is_measured_alone() -> None:
    made = variants("http://c", parse([]).rates)
    assert list(made) == ["off", "off-again", "json", "traced-20", "traced-200"]
    assert made["off"] == made["off-again"] == ()
    assert made["traced-20"] == ("--otlp-endpoint", "http://c", "--trace-rate", "20")


def test_the_collector_is_the_same_program() -> None:
    with collector() as endpoint:
        assert endpoint.startswith("http://127.0.0.1:")
