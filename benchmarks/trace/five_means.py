"""Attainment within five times the mean latencies of full provisioning, of this run or an earlier one."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.trace.measures import Answer, Slo, five_means

FULL = "fixed-full"  # the mode of which five times the means are a target

# What mean latencies of full provisioning depend on.
_SAME = (
    *("emulated", "trace", "half", "start", "from_s", "minutes", "speedup", "requests", "nodes", "slower"),
    *("functions", "seed", "arena_bytes", "late_s"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FiveMeans:
    """Five times the means, and the file that they are from, "" for the run itself."""

    slo: Slo
    file: str = ""

    def record(self) -> dict[str, Any]:
        return {"of": FULL, "file": self.file, **asdict(self.slo)}


def read_five_means(path: Path, params: Mapping[str, Any]) -> FiveMeans:
    """Return five times the means of an earlier record of full provisioning with the same scenario.

    Raises OSError; ValueError if there is none, if it does not count, or if its scenario differs.
    """
    rows = [row for row in json.loads(path.read_text()) if row["name"] == FULL]
    found = next((row for row in rows if row.get("slo_5x")), None)
    if found is None:
        raise ValueError(f"--slo-from: {path} has no record of {FULL} with its means")
    if not found["counts"]:
        raise ValueError(f"--slo-from: the record of {FULL} in {path} does not count")
    earlier = found["params"]
    differing = [name for name in _SAME if earlier.get(name) != params[name]]
    if differing:
        pairs = (f"{name} {earlier.get(name)}, not {params[name]}" for name in differing)
        raise ValueError(f"--slo-from: {path} is of another scenario: {'; '.join(pairs)}")
    slo = Slo(ttft_s=found["slo_5x"]["ttft_s"], tbt_s=found["slo_5x"]["tbt_s"])
    return FiveMeans(slo=slo, file=path.name)


def add_five_means(
    rows: Sequence[dict[str, Any]],
    answers: Mapping[str, Sequence[Answer]],
    earlier: FiveMeans | None = None,
) -> None:
    """Add each mode's attainment of five times the means, None if full provisioning is nowhere."""
    full = answers.get(FULL)
    five = FiveMeans(slo=five_means(full)) if full else earlier
    for row in rows:
        own = answers[row["name"]]
        row["slo_5x_attainment"] = None if five is None else five.slo.attainment(own, row["failed"])
        row["slo_5x"] = None if five is None else five.record()
