"""What is made of the measurements of the cost of traces."""

import pytest

from benchmarks.tracing_cost import Loads, collector, parse, records, show, variants


def test_the_cost_is_against_the_load_of_the_same_round() -> None:
    # The machine is half as fast in the second round.
    found = {
        "off": Loads([1000.0, 500.0, 1000.0], [200.0, 400.0, 200.0]),
        "traced-20": Loads([980.0, 490.0, 990.0], [202.0, 404.0, 210.0]),
    }
    off, traced = records(found)
    assert (off["cost"], off["cpu_cost"]) == (0.0, 0.0)
    assert traced["cost"] == pytest.approx(0.02) and traced["cpu_cost"] == pytest.approx(0.01)
    assert "costs +2.0% (+1.0% to +2.0%); 210 us" in show(traced)


def test_platforms_differ_in_what_is_measured_alone() -> None:
    made = variants("http://c", parse([]).rates)
    assert list(made) == ["off", "off-again", "json", "traced-20", "traced-200"]
    assert made["off"] == made["off-again"] == ()
    assert made["traced-20"] == ("--otlp-endpoint", "http://c", "--trace-rate", "20")


def test_the_collector_is_the_same_program() -> None:
    with collector() as endpoint:
        assert endpoint.startswith("http://127.0.0.1:")
