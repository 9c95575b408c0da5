"""One short run of the whole trace experiment."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.testbed.network import unavailable_reason
from benchmarks.trace.measures import (
    integral,
)
from tests.fixtures.patience import PATIENCE_S


def test_a_short_trace_is_sent_to_a_platform_in_the_testbed(tmp_path: Path) -> None:
    if reason := unavailable_reason():
        pytest.skip(f"no testbed here: {reason}")
    trace, out = tmp_path / "t.csv", tmp_path / "t.json"
    rows = "".join(f"{place / 10},{200 + place},4\n" for place in range(10))
    trace.write_text(f"seconds,prompt_tokens,output_tokens\n{rows}")
    options = ("--trace", trace, "--minutes", "0.1", "--speedup", "1", "--nodes", "2", "--slower", "1")
    more = ("--tail", "0.2", "--modes", "hypercast", "--json", out)
    command_line = [sys.executable, "-m", "benchmarks.trace", *map(str, (*options, *more))]
    done = subprocess.run(command_line, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    (row,) = json.loads(out.read_text())
    assert done.returncode == (0 if row["counts"] else 1), done.stderr
    assert (row["requests"], row["failed"], row["ledger_ok"]) == (10, 0, True)
    assert row["network"]["gateway_bytes"] > 10 * 1000  # prompts of as many ids at least
    assert row["instances_per_node"] == 1
    assert 0 < row["gpu_s"] <= 2 * row["window_s"]
    assert integral(row["instances"], 0.0, row["window_s"]) == pytest.approx(row["gpu_s"], rel=0.2)
