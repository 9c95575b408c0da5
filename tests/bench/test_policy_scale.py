"""The benchmark of planning steps: each part has a limit, and one above it fails the run."""

import json
from pathlib import Path

import pytest

from benchmarks.policy_scale import main

PARTS = [
    f"{part}-{state}"
    for state in ("quiet", "burst", "full")
    for part in ("policy", "decision", "plan", "controller")
]
SMALL = ["--functions", "10", "--nodes", "40", "--repeat", "1"]


def test_every_part_is_held_against_the_limit(tmp_path: Path) -> None:
    main([*SMALL, "--limit-ms", "60000", "--json", str(tmp_path / "out.json")])
    rows = {row["name"]: row for row in json.loads((tmp_path / "out.json").read_text())}
    assert list(rows) == PARTS
    assert all(row["limit_s"] == 60 and 0 < row["ratio_to_limit"] < 1 for row in rows.values())
    assert rows["controller-quiet"]["starts"] == rows["controller-full"]["starts"] == 0
    assert rows["controller-burst"]["starts"] > 0


def test_a_part_above_the_limit_fails_the_run_after_all_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*SMALL, "--limit-ms", "0.0001", "--json", str(tmp_path / "out.json")])
    assert ended.value.code == 1
    assert "controller-burst" in capsys.readouterr().err
    assert len(json.loads((tmp_path / "out.json").read_text())) == len(PARTS)
