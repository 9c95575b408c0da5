"""The benchmark of host copies: its mean, and a small run."""

import json
from pathlib import Path

import pytest

from benchmarks import host_copies
from benchmarks.trace.watch import UsageSample


def test_the_mean_counts_only_what_lies_between_its_ends() -> None:
    samples = [
        UsageSample(at_s=at_s, allocated=0, ready=0, host_bytes=host_bytes, cast_bytes=0)
        for at_s, host_bytes in ((0.0, 100), (10.0, 800), (15.0, 100))
    ]
    assert host_copies.mean_copies(samples, 100, 5.0, 25.0) == pytest.approx((5 + 5 * 8 + 10) / 20)


def test_hosts_that_keep_copies_have_as_many_as_instances(tmp_path: Path) -> None:
    file = tmp_path / "h.json"
    options = "--nodes 2 --minutes 0.05 --rounds 1"
    host_copies.main([*options.split(), "--json", str(file)])
    rows = {row["name"]: row for row in json.loads(file.read_text())}
    assert set(rows) == {"hypercast", "all-copies"}
    for row in rows.values():
        assert 1.0 <= row["mean_copies"] <= 2.0 and row["calls"] > 0 and row["params"]["image_bytes"] > 0
    assert [rows[name]["peak_copies"] < 0.1 for name in ("hypercast", "all-copies")] == [True, False]
