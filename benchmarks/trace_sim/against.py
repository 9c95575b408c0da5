"""The comparison of simulated with measured runs: same requests, nodes, profile and settings."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.records import Record
from benchmarks.scaleout.profiles import PROFILES
from benchmarks.trace_sim.modes import MODES

# Parameters of a measured record that are options of a simulation, by name; `slo` holds the targets.
_SAME = (
    "trace",
    "half",
    "start",
    "minutes",
    "speedup",
    "nodes",
    "slower",
    "functions",
    "seed",
    "policy",
    "target_concurrency",
    "scale_down_delay",
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
            options = [(f"--{key.replace('_', '-')}", str(params[key])) for key in _SAME]
            options += [("--ttft-target", str(params["slo"]["ttft_s"]))]
            options += [("--tbt-target", str(params["slo"]["tbt_s"]))]
            # An idle surplus ends as any other, and the profile is known by its device and model.
            options += [("--keep-alive", str(params["scale_down_delay"]))]
            options += [("--emulated", _profile_of(params["emulated"]))]
            found.append(MeasuredRun(name=name, record=record, options=options))
    if not found:
        raise ValueError(f"{path}: no record of a mode that is simulated ({', '.join(MODES)})")
    return found


def compared(row: Record, run: MeasuredRun) -> Record:
    """Return the simulated record with what was measured beside it."""
    fields = ("gpu_s", "slo_attainment", "ttft_p50_s", "ttft_p90_s", "tbt_p50_s", "requests")
    known = {f"measured_{name}": run.record.get(name) for name in fields}
    return {**row, **known, "gpu_s_ratio": round(row["gpu_s"] / run.record["gpu_s"], 4)}


def _profile_of(text: str) -> str:
    """Return the name of the profile that a record describes. Raises ValueError."""
    for name, profile in PROFILES.items():
        if text.partition(",")[0] == str(profile):
            return name
    raise ValueError(f"{text!r} is no known profile")
