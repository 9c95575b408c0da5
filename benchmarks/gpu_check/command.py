"""Check and measure the platform on a machine with a GPU, in one command.

Needs no network, Redis or server: torch (2.11 or later), transformers (5.17 or later), numpy, msgspec,
xxhash and safetensors; cupy for the arena's parts, psutil for `start`. It ends within --budget seconds:
parts without time left are skipped and recorded so. A part that fails is recorded with its error, and the
others go on.

tokens     each decoder family in float32 and bfloat16, by Hugging Face's layers and by the fused ones, eager
           and as CUDA graphs: every token must be the best of transformers' logits, up to near ties
speed      tokens per second at batch 1, 8 and 32 of a random 8B Llama in bfloat16, eager and as CUDA graphs,
           beside transformers' generate and the limit: the measured memory rate over the weights that a
           decode step reads
copies     an image from the host tier to the arena, through page-locked memory and not, beside one plain copy
start      an instance started by the node's own code, by phase: from the host tier, and hot
ipc        another process's arena read in place, by CUDA IPC
integrity  the arena's regions are disjoint and keep their bytes; torch reads them in place

`--device cpu` runs the same on small shapes. The file is a list of records; the first is the summary.

examples:
  python -m benchmarks.gpu_check --json gpu-check.json
  python -m benchmarks.gpu_check --device cpu --parts tokens,integrity --json small.json
"""

import gc
import importlib
import importlib.util
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from benchmarks.gpu_check.parts import Part, PartTask, Row, release_cached_memory, row
from benchmarks.harness.arguments import benchmark_parser, say, some_of
from benchmarks.harness.records import describe_run, recording

_PACKAGES = ("torch", "transformers", "numpy", "safetensors", "msgspec", "xxhash", "triton")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPlan:
    """A part: its module and function, and its maximum share of the remaining time.

    The module is imported when the part runs, so that a missing package fails this part only.
    """

    name: str
    module: str
    function: str
    share: float
    needs_cupy: bool = False


# In order of importance: the last are skipped first.
PARTS = (
    PartPlan(name="tokens", module="tokens", function="check", share=0.35),
    PartPlan(name="integrity", module="memory", function="integrity", share=0.2, needs_cupy=True),
    PartPlan(name="ipc", module="ipc", function="check", share=0.2, needs_cupy=True),
    PartPlan(name="copies", module="memory", function="copies", share=0.3, needs_cupy=True),
    PartPlan(name="start", module="start", function="check", share=0.5, needs_cupy=True),
    PartPlan(name="speed", module="speed", function="check", share=1.0),
)


def run_part(plan: PartPlan, device: str, small: bool, ends_s: float) -> tuple[Row, list[Row]]:
    """Run a part; return its status and its rows."""
    started_s = time.perf_counter()
    task = PartTask(device=device, small=small, ends_s=started_s + plan.share * (ends_s - started_s), say=say)
    if plan.needs_cupy and task.cuda and importlib.util.find_spec("cupy") is None:
        return {"status": "skipped", "reason": "cupy is not installed", "seconds": 0.0}, []
    if task.left_s < 1:
        return {"status": "skipped", "reason": "no time left", "seconds": 0.0}, []
    say(f"{plan.name}: at most {task.left_s:.0f} s")
    try:
        part: Part = getattr(importlib.import_module(f"benchmarks.gpu_check.{plan.module}"), plan.function)
        rows = part(task)
    except Exception as error:  # recorded; the other parts go on
        say(traceback.format_exc())
        end: Row = {"status": "failed", "error": f"{type(error).__name__}: {error}"[:2000]}
        rows = []
    else:
        wrong = sum(one.get("ok") is False for one in rows)
        left_out = sum("skipped" in one for one in rows)
        end = {"status": "wrong" if wrong else "ok", "rows": len(rows), "wrong": wrong, "left_out": left_out}
    gc.collect()
    release_cached_memory(device)
    return end | {"seconds": time.perf_counter() - started_s}, rows


def run(device: str, small: bool, chosen: Sequence[str], budget_s: float) -> list[Row]:
    """Run the parts and return all rows; the first is the summary."""
    started_s = time.perf_counter()
    ends_s = started_s + budget_s
    facts = describe(device)
    parts: dict[str, Row] = {}
    rows: list[Row] = []
    for plan in PARTS:
        if plan.name not in chosen:
            continue
        parts[plan.name], found = run_part(plan, device, small, ends_s)
        for one in found:
            one["params"] = {"part": plan.name, **one["params"]}
        rows += found
        say(f"{plan.name}: {parts[plan.name]}")
    good = all(part["status"] in ("ok", "skipped") for part in parts.values())
    summary = row(
        "gpu-check",
        {"device": device, "small": small, "budget_s": budget_s, **facts},
        ok=good,
        seconds=[time.perf_counter() - started_s],
        parts=parts,
    )
    return [summary, *rows]


def describe(device: str) -> Row:
    """Return the machine, its driver, and package versions."""
    facts: Row = {**describe_run("benchmarks.gpu_check"), "system": platform.platform()}
    facts["versions"] = {name: _version(name) for name in _PACKAGES}
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "gpu": properties.name,
            "gpu_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "driver": _driver(),
            "cupy": _cupy_version(),
        }
    return facts


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _cupy_version() -> str:
    return next((found for name in ("cupy-cuda13x", "cupy-cuda12x", "cupy") if (found := _version(name))), "")


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().partition("\n")[0]


def show(one: Row) -> str:
    """Format a row as one line."""
    params = " ".join(f"{key}={value}" for key, value in one["params"].items())
    figures = " ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in one.items()
        if key not in ("name", "params")
    )
    return f"{one['name']:13} {params}  {figures}"


def main(argv: Sequence[str] | None = None) -> None:
    names = [plan.name for plan in PARTS]
    parser = benchmark_parser("benchmarks.gpu_check", __doc__)
    add = parser.add_argument
    add("--device", default="cuda:0", help="cuda:N, or cpu for small shapes")
    add("--parts", type=some_of(names), default=",".join(names), help="comma-separated parts")
    add("--budget", type=float, default=500.0, help="seconds in total")
    args = parser.parse_args(argv)
    if args.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"torch finds no GPU for {args.device}: use --device cpu for small shapes")
    device = "cuda:0" if args.device == "cuda" else args.device
    with recording("gpu_check", json=args.json, show=show) as out:
        out.add(*run(device, device == "cpu", args.parts, args.budget))
    summary = out.records[0]
    if not summary["ok"]:
        sys.exit(f"gpu_check: failed parts: {summary['parts']}")


if __name__ == "__main__":
    main()
