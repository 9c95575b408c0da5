"""The load benchmark on small weights: every way is taken, and the records say so."""

import json
from pathlib import Path

from benchmarks.load.command import main


def test_every_way_is_measured(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    main(["--size", "1MB", "--rounds", "1", "--folder", str(folder), "--json", str(tmp_path / "load.json")])
    rows = json.loads((tmp_path / "load.json").read_text())
    seen = {(row["params"]["path"], row["params"]["cache"], row["name"]) for row in rows}
    names = ("hypercast", "limit", "safetensors", "safetensors-mapped", "transformers")
    for cache in ("cold", "warm"):
        assert {("disk-host", cache, name) for name in names} <= seen
    assert ("disk-host", "warm", "hypercast-mapped") in seen
    assert {("host-device", "", "hypercast"), ("host-device", "", "limit"), ("bind", "", "hypercast")} <= seen
    for row in rows:
        assert row["gb_per_s"] > 0 and len(row["seconds"]) == 1 and row["params"]["bytes"] > 50e6
        limited = row["params"]["path"] != "bind"
        assert ("limit_s" in row) == limited
        if limited:
            assert abs(row["share_of_limit"] * row["ratio_to_limit"] - 1) < 1e-9 and row["shares"]
