"""The comparison of simulated with measured runs: same requests, nodes, profile and settings."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.records import Record
from benchmarks.trace_sim.modes import MODES

# Parameters of a measured record that are options of a simulation, by name.
_SAME = (
    "trace",
    "half",
    "start",
    "minutes",
    "speedup",
    "nodes",
    "emulated",
    "slower",
    "policy",
    "ttft_target",
    "tbt_target",
    "scale_down_delay",
    "keep_alive",
    "min_instances",
    "start_ms",
    "react_ms",
    "call_ms",
    "target_concurrency",
    "host_ttl",
    "tail",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """A measured record: its mode, GPU seconds, and the options of its simulation."""

    name: str
    record: Record
    options: Sequence[tuple[str, str]]


def measured(path: Path) -> list[MeasuredRun]:
    """Read the records of benchmarks.trace in a mode that can be simulated. Raises OSError, ValueError."""
    found = []
    for record in json.loads(path.read_text()):
        name, params = record["name"], record["params"]
        if name in MODES:
            given = [key for key in _SAME if params.get(key) is not None]
            options = [(f"--{key.replace('_', '-')}", str(params[key])) for key in given]
            found.append(MeasuredRun(name=name, record=record, options=options))
    if not found:
        raise ValueError(f"{path}: no record of a mode that is simulated ({', '.join(MODES)})")
    return found


def compared(row: Record, run: MeasuredRun) -> Record:
    """Return the simulated record with what was measured beside it."""
    fields = ("gpu_s", "slo_attainment", "ttft_p50_s", "ttft_p90_s", "tbt_p50_s", "requests")
    known = {f"measured_{name}": run.record.get(name) for name in fields}
    return {**row, **known, "gpu_s_ratio": round(row["gpu_s"] / run.record["gpu_s"], 4)}
