"""What the benchmark of pairs makes of the ends of requests."""

import pytest

from benchmarks.scaleout.scenarios import emulated_device
from benchmarks.zigzag import LoadTimeline, parse, record_of


def test_a_rate_is_from_one_end_to_another() -> None:
    seen = LoadTimeline(ends_s=[1.0, 3.0, 5.0, 6.0, 20.0])
    assert seen.rate(0.0, 5.5) == 0.5
    assert seen.rate(4.0, 6.5) == 1.0
    assert seen.rate(6.0, 10.0) == seen.rate(30.0, 40.0) == 0.0


def test_the_gain_is_that_of_the_loads_third_quarter() -> None:
    args = parse(["--slower", "10", "--own", "4"])
    alone = LoadTimeline(ends_s=[1.0 + 2 * place for place in range(9)])
    helped = LoadTimeline(
        ends_s=[*(2.0 * place for place in range(21)), *(40.0 + place for place in range(1, 41))],
        kinds=["live"] * 61,
        started_s=0.0,
        ready_s=80.0,
    )
    record = record_of(alone, helped, args)
    assert record["own_per_s"] == 5.0 and record["load_s"] == 8.0
    assert record["gain"] == 2.0 and record["live"] == 61 and record["failed"] == []
    assert record["gain_by_part"] == [1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0]


def test_the_device_is_as_slow_as_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert str(emulated_device(parse(["--slower", "5"]))) == "emulated:h800/1000/5"
    with pytest.raises(SystemExit):
        parse(["--emulated", "tpu"])
    assert "is no profile" in capsys.readouterr().err
