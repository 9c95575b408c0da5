"""What the benchmark of pairs makes of the times at which prompts have been run."""

import pytest

from benchmarks.scaleout.scenarios import emulated_device
from benchmarks.zigzag import LoadTimes, PromptTimes, gain, parse, record_of, theory


def test_the_own_rate_is_without_the_first_requests() -> None:
    seen = PromptTimes(ends=[(1.0, 900), (2.0, 900), (4.0, 900), (5.0, 100), (9.0, 300), (7.0, 200)])
    assert seen.own_rate() == 600 / 5


def test_the_tokens_of_a_step_count_evenly_since_the_one_before() -> None:
    seen = PromptTimes(ends=[(2.0, 100), (4.2, 100), (4.0, 300), (6.2, 50)], together_s=0.5)
    assert seen.tokens(2.0, 4.2) == pytest.approx(400)
    assert seen.tokens(2.0, 3.1) == pytest.approx(200)
    assert seen.tokens(0.0, 2.0) == 0
    assert seen.tokens(3.1, 9.0) == pytest.approx(250)


def test_the_gain_is_over_all_loads() -> None:
    seen = PromptTimes(ends=[(float(second), 100) for second in range(20)])
    seen.ends += [(float(second), 100) for second in range(5, 9)]
    loads = [LoadTimes(started_s=0.0, ready_s=8.0), LoadTimes(started_s=10.0, ready_s=18.0)]
    assert gain(seen, loads[:1], 100.0, 0.5, 1.0) == 2.0
    assert gain(seen, loads[:1], 100.0, 0.0, 0.5) == 1.0
    assert gain(seen, loads, 100.0, 0.5, 1.0) == 1.5
    args = parse(["--slower", "10"])
    record = record_of(seen, loads, 100.0, args)
    assert (record["own_per_s"], record["load_s"], record["second_half"]) == (1000.0, 0.8, 1.5)
    assert record["gain_by_part"] == [1.0] * 4 + [1.5] * 4


def test_in_theory_the_loaded_layers_are_saved_up_to_a_half() -> None:
    assert theory(0.0, 1 / 8) == pytest.approx(1.068, abs=1e-3)
    assert theory(3 / 8, 0.5) == pytest.approx(1.785, abs=1e-3)
    assert theory(0.5, 0.75) == theory(7 / 8, 1.0) == 2.0
    assert theory(0.25, 0.75) == pytest.approx((theory(0.25, 0.5) + 2.0) / 2)


def test_the_device_is_as_slow_as_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    args = parse(["--slower", "5", "--prompt-tokens", "100,20"])
    assert str(emulated_device(args)) == "emulated:h800/1000/5" and args.prompt_tokens == (100, 20)
    with pytest.raises(SystemExit):
        parse(["--emulated", "tpu"])
    assert "is no profile" in capsys.readouterr().err
