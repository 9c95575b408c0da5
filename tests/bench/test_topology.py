"""The topology benchmark: its leaves, its contenders and (as root) a small run."""

import json
from pathlib import Path

import pytest

from benchmarks.harness.crew import Crew
from benchmarks.testbed.network import unavailable_reason
from benchmarks.topology import command


def test_leaves_are_drawn_evenly_and_again_the_same() -> None:
    drawn = command.draw_leaves(8, 2, 0)
    assert drawn[0] == 0 and sorted(drawn) == [0] * 4 + [1] * 4
    assert drawn == command.draw_leaves(8, 2, 0)
    assert len({command.draw_leaves(8, 2, seed) for seed in range(10)}) > 3
    with pytest.raises(ValueError, match="2 nodes cannot be under 3 leaf switches"):
        command.draw_leaves(2, 3, 0)


def test_only_ours_has_the_leaves() -> None:
    args = command.parse(["--nodes", "8", "--leaves", "2"])
    crew = Crew.__new__(Crew)
    ours, blind, *rivals = command.contenders(crew, args, command.draw_leaves(8, 2, 0))
    assert ours.task is not None and blind.task is not None
    assert (ours.name, ours.task.planner, len(ours.task.leaves)) == ("hypercast", "multi-chain", 8)
    assert (blind.name, blind.task.leaves) == ("topology-blind", [])
    assert "1 copy between 2 leaf switches" in ours.reason
    assert [one.name for one in rivals] == ["blind-binomial", "blind-tree"]


def test_what_cannot_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--nodes", "2", "--sources", "2"], ["--nodes", "2", "--leaves", "3"]):
        with pytest.raises(SystemExit):
            command.parse(arguments)
    assert "each leaf needs a host" in capsys.readouterr().err


@pytest.mark.skipif(bool(unavailable_reason()), reason=unavailable_reason() or "none")
def test_one_copy_crosses_the_spine(tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    options = "--nodes 4 --leaves 2 --size 8MiB --rate 200mbit --spine-rate 200mbit --repeat 1 --rivals tree"
    command.main([*options.split(), "--json", str(file)])
    rows = {row["name"]: row for row in json.loads(file.read_text())}
    assert set(rows) == {"hypercast", "topology-blind", "blind-tree"}
    assert 0.95 < rows["hypercast"]["spine_copies"] < 1.25
    for row in rows.values():
        assert row["median_s"] >= 0.9 * row["limit_s"] and row["spine_bytes"] > 0
