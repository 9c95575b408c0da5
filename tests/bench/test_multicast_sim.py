"""The simulated casts: every planner and condition has a record, and no figure of a paper passes for ours."""

import json
from pathlib import Path

import pytest

from benchmarks.multicast_sim.command import main
from benchmarks.multicast_sim.runs import AUTOMATIC, MODEL_BYTES, PAPER_S
from rdmacast.plan.planners.catalog import PLANNERS


def run(*arguments: str) -> int:
    """Return the exit status of the command."""
    try:
        main(arguments)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    return 0


def test_every_planner_and_condition_is_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    for file in (first, second):
        assert run("--nodes", "2,8", "--blocks", "16", "--models", "13B", "--json", str(file)) == 0
    printed = capsys.readouterr()
    assert printed.out.count("SIMULATED") == 100 and "of 50" in printed.err
    rows = json.loads(first.read_text())
    assert all(
        row | {"run": 0} == again | {"run": 0}
        for row, again in zip(rows, json.loads(second.read_text()), strict=True)
    )
    ours = [row for row in rows if row["params"]["simulated"]]
    seen = {(row["name"], row["params"]["nodes"], row["params"]["condition"]) for row in ours}
    expected = {
        (name, 8, condition)
        for name in (*PLANNERS, AUTOMATIC)
        for condition in ("even", "jitter", "straggler")
    }
    assert expected <= seen and len(seen) == len(ours) == 50
    for row in ours:
        assert row["params"]["bytes"] == MODEL_BYTES["13B"] == 26e9 and row["limit_s"] == 0.52
        assert (
            1
            <= row["others_ratio_to_limit"]
            <= row["ratio_to_limit"]
            == pytest.approx(row["median_s"] / 0.52, rel=1e-4)
        )
    even = {
        row["name"]: row["ratio_to_limit"]
        for row in ours
        if row["params"]["condition"] == "even" and row["params"]["nodes"] == 8
    }
    assert even["binomial"] == pytest.approx(18 / 16, rel=1e-2) and even["chain"] == pytest.approx(
        22 / 16, rel=1e-2
    )
    papers = [row for row in rows if not row["params"]["simulated"]]
    assert {row["name"]: row["median_s"] for row in papers} == {
        f"{system} (from the paper)": seconds for system, seconds in PAPER_S["13B"].items()
    }


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "out" / "sim.png"
    assert run("--nodes", "2,4", "--planner", "binomial,automatic", "--blocks", "8", "--plot", str(file)) == 0
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "wrong", [("--planner", "fast"), ("--nodes", "0"), ("--models", "8B"), ("--jitter", "-1")]
)
def test_wrong_options_are_refused(wrong: tuple[str, str]) -> None:
    assert run(*wrong) == 2
    assert run("--nodes", "2", "--sources", "2") == 1
