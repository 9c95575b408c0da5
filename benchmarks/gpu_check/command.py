"""One command for a machine with a GPU: what the platform does there, checked and measured.

`make gpu-check`, or `python -m benchmarks.gpu_check --json FILE`. Needs no network, no Redis and no
server: torch (2.11 or later), transformers (5.17 or later), numpy, msgspec, xxhash and safetensors; for the
arena's parts cupy, and psutil for `start`. It ends within `--budget` seconds: what there is no time for is
left out, and says so. A part that fails is recorded with its error, and the others go on.

tokens     each decoder family in float32 and bfloat16, by Hugging Face's layers and by the fused ones, eager
           and as CUDA graphs: every token must be the best of transformers' logits, up to near ties
speed      tokens per second at batch 1, 8 and 32 of a random Llama of eight billion parameters in bfloat16,
           eager and as CUDA graphs, beside transformers' generate and the limit: the measured rate of memory
           by the weights that a decode step reads
copies     an image from the host tier to the arena, page-locked and not, beside one plain copy
start      an instance by the node's own code, by phase: from the host tier, and hot
ipc        another process's arena read in place, by CUDA IPC
integrity  the arena's regions lie apart and keep their bytes; torch sees them in place

`--device cpu` runs the same on small shapes. The file is a list of rows; the first sums up.
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
from pathlib import Path

import torch

from benchmarks.arguments import parser_of, say
from benchmarks.gpu_parts import Part, Row, Task, give_back_memory, row
from benchmarks.machine import describe_machine, write_records

_PACKAGES = ("torch", "transformers", "numpy", "safetensors", "msgspec", "xxhash", "triton")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPlan:
    """A part: where its code is, and what of the time left it may take at most.

    Imported when it runs, so that a package that is missing fails this part alone.
    """

    name: str
    module: str
    function: str
    share: float
    needs_cupy: bool = False


# The order is that of worth: what comes last is left out first.
PARTS = (
    PartPlan(name="tokens", module="gpu_tokens", function="check", share=0.35),
    PartPlan(name="integrity", module="gpu_memory", function="integrity", share=0.2, needs_cupy=True),
    PartPlan(name="ipc", module="gpu_ipc", function="check", share=0.2, needs_cupy=True),
    PartPlan(name="copies", module="gpu_memory", function="copies", share=0.3, needs_cupy=True),
    PartPlan(name="start", module="gpu_start", function="check", share=0.5, needs_cupy=True),
    PartPlan(name="speed", module="gpu_speed", function="check", share=1.0),
)


def run_part(plan: PartPlan, device: str, small: bool, ends_s: float) -> tuple[Row, list[Row]]:
    """What became of the part, and its rows."""
    began_s = time.perf_counter()
    task = Task(device=device, small=small, ends_s=began_s + plan.share * (ends_s - began_s), say=say)
    if plan.needs_cupy and task.cuda and importlib.util.find_spec("cupy") is None:
        return {"status": "skipped", "reason": "cupy is not installed", "seconds": 0.0}, []
    if task.left_s < 1:
        return {"status": "skipped", "reason": "no time was left", "seconds": 0.0}, []
    say(f"{plan.name}: at most {task.left_s:.0f} s")
    try:
        part: Part = getattr(importlib.import_module(f"benchmarks.{plan.module}"), plan.function)
        rows = part(task)
    except Exception as error:  # whatever it is, the other parts go on, and the file tells of it
        say(traceback.format_exc())
        end: Row = {"status": "failed", "error": f"{type(error).__name__}: {error}"[:2000]}
        rows = []
    else:
        wrong = sum(one.get("ok") is False for one in rows)
        left_out = sum("skipped" in one for one in rows)
        end = {"status": "wrong" if wrong else "ok", "rows": len(rows), "wrong": wrong, "left_out": left_out}
    gc.collect()
    give_back_memory(device)
    return end | {"seconds": time.perf_counter() - began_s}, rows


def run(device: str, small: bool, wanted: Sequence[str], budget_s: float) -> list[Row]:
    """All rows; the first sums up."""
    began_s = time.perf_counter()
    ends_s = began_s + budget_s
    facts = describe(device)
    parts: dict[str, Row] = {}
    rows: list[Row] = []
    for plan in PARTS:
        if plan.name not in wanted:
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
        seconds=[time.perf_counter() - began_s],
        parts=parts,
    )
    return [summary, *rows]


def describe(device: str) -> Row:
    """The machine, its driver, and the versions of what runs."""
    facts: Row = {**describe_machine("benchmarks.gpu_check"), "system": platform.platform()}
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
    """One line for people."""
    params = " ".join(f"{key}={value}" for key, value in one["params"].items())
    figures = " ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in one.items()
        if key not in ("name", "params")
    )
    return f"{one['name']:13} {params}  {figures}"


def main(argv: Sequence[str] | None = None) -> None:
    names = [plan.name for plan in PARTS]
    parser = parser_of("benchmarks.gpu_check", __doc__)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument(
        "--device", default="cuda:0", help="cuda:N, or cpu for small shapes (default: cuda:0)"
    )
    parser.add_argument("--parts", type=lambda text: text.split(","), default=names, help="default: all")
    parser.add_argument("--budget", type=float, default=500.0, help="seconds in all (default: 500)")
    args = parser.parse_args(argv)
    if unknown := set(args.parts) - set(names):
        parser.error(f"no such part: {', '.join(sorted(unknown))} (there are {', '.join(names)})")
    if args.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"torch sees no GPU for {args.device}: use --device cpu for the small shapes")
    device = "cuda:0" if args.device == "cuda" else args.device
    rows = run(device, device == "cpu", args.parts, args.budget)
    for one in rows[1:]:
        print(show(one))
    if args.json:
        write_records(args.json, rows)
    if not rows[0]["ok"]:
        sys.exit(f"something is wrong: {rows[0]['parts']}")


if __name__ == "__main__":
    main()
