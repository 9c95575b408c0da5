"""The interpreter that has vLLM."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEFAULT = ROOT / ".venv-vllm" / "bin" / "python"


def find_python() -> Path | None:
    """Return the interpreter to test with, None if there is none."""
    if given := os.environ.get("HYPERCAST_VLLM_PYTHON"):
        return Path(given)
    return DEFAULT if DEFAULT.exists() and (ROOT / ".venv-vllm" / ".installed").exists() else None
