"""The comparison of simulated with measured runs: same requests, nodes, profile and settings."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from benchmarks.harness.records import Record
from benchmarks.scaleout.profiles import PROFILES
from benchmarks.trace.records import BUSY_LIMIT, LATE_LIMIT_S
from benchmarks.trace_sim.modes import MODES
from invoker.emulated.kv import kv_shape
from invoker.emulated.profiles import Profile
from invoker.engine.kv.cache import PAGE_TOKENS

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
    "host_ttl",
    "tail",
)
# The same where records have them; earlier ones had the defaults.
_SINCE = {"min-instances": "min_instances", "host-images": "host_models", "sample": "sample"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """A measured record: its mode, GPU seconds, and the options of its simulation."""

    name: str
    record: Record
    options: Sequence[tuple[str, str]]


def measured(path: Path, *, anyway: bool = False) -> list[MeasuredRun]:
    """Read the records of benchmarks.trace in a mode that can be simulated. Raises OSError, ValueError.

    A record that does not count raises ValueError, or is used `anyway`.
    """
    found = []
    for record in json.loads(path.read_text()):
        name, params = record["name"], record["params"]
        if name in MODES:
            faults = _faults(record)
            if faults and not anyway:
                raise ValueError(f"{path}: {name} does not count: {', '.join(faults)} (--anyway uses it)")
            if params.get("holders", "gpu") != "gpu":
                raise ValueError(f"{path}: {name} began with copies in host memory, which is not simulated")
            options = [(f"--{key.replace('_', '-')}", str(params[key])) for key in _SAME]
            options += [("--ttft-target", str(params["slo"]["ttft_s"]))]
            options += [("--tbt-target", str(params["slo"]["tbt_s"]))]
            delay_s = params["scale_down_delay"]
            options += [] if delay_s is None else [("--scale-down-delay", str(delay_s))]
            # An idle surplus ends as any other, and the profile is known by its device and model.
            options += [("--keep-alive", str(params.get("keep_alive", delay_s)))]
            options += [(f"--{key}", str(params[name])) for key, name in _SINCE.items() if name in params]
            options += [("--drain-calls", "move" if params.get("moves") else "finish")]
            profile = _profile_of(params["emulated"])
            options += [("--emulated", profile)]
            if "arena_bytes" in params and params["functions"] == 1:
                options += [("--kv-tokens", str(_kv_tokens(PROFILES[profile], params)))]
            found.append(MeasuredRun(name=name, record=record, options=options))
    if not found:
        raise ValueError(f"{path}: no record of a mode that is simulated ({', '.join(MODES)})")
    return found


def compared(row: Record, run: MeasuredRun) -> Record:
    """Return the simulated record with what was measured beside it."""
    fields = (
        "gpu_s",
        "gpu_loading_s",
        "gpu_busy_s",
        "slo_attainment",
        "ttft_mean_s",
        "ttft_p50_s",
        "ttft_p90_s",
        "tbt_p50_s",
        "requests",
        "starts",
    )
    known = {f"measured_{name}": run.record.get(name) for name in fields}
    ratio = round(row["gpu_s"] / run.record["gpu_s"], 4)
    return {**row, **known, "gpu_s_ratio": ratio, "gpu_s_difference": _causes(row, run.record)}


def _causes(row: Record, record: Record) -> dict[str, float]:
    """Return simulated minus measured GPU seconds by what instances did."""
    loading_s, busy_s = (row[f"gpu_{what}_s"] - record[f"gpu_{what}_s"] for what in ("loading", "busy"))
    idle_s = row["gpu_s"] - record["gpu_s"] - loading_s - busy_s
    return {"loading": round(loading_s, 3), "busy": round(busy_s, 3), "idle": round(idle_s, 3)}


def _faults(record: Record) -> list[str]:
    """Return why a measured record does not count."""
    late_s, busy = record.get("client_late_p99_s", inf), record.get("processor_share", inf)
    found = [f"the client was {late_s * 1e3:.0f} ms late"] if late_s >= LATE_LIMIT_S else []
    found += [f"processors were {busy:.0%} busy"] if busy >= BUSY_LIMIT else []
    found += [] if record.get("ledger_ok", True) else ["the ledger is not exact"]
    return found + ([f"{record['failed']} requests failed"] if record.get("failed") else [])


def _kv_tokens(profile: Profile, params: Mapping[str, Any]) -> int:
    """Return the tokens that fit into the KV cache of a measured instance.

    At a scale a layer's K and V take whole items, so that fewer fit than without.
    """
    _, _, scale = params["emulated"].rpartition("1/")
    scaled = replace(profile, scale=int(scale) if scale.isdigit() else 1)
    free_bytes = (params["arena_bytes"] - params["image_bytes"]) // scaled.scale
    page_bytes = kv_shape(scaled, scaled.model.layers).page_bytes
    return free_bytes // 2 // page_bytes * PAGE_TOKENS


def _profile_of(text: str) -> str:
    """Return the name of the profile that a record describes. Raises ValueError."""
    for name, profile in PROFILES.items():
        if text.partition(",")[0] == str(profile):
            return name
    raise ValueError(f"{text!r} is no known profile")
