"""What a result file says of where it comes from, and how it is written."""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def describe_machine(module: str) -> dict[str, object]:
    """Commit (marked if the tree differs from it), machine, load and command of this run."""
    return {
        "commit": commit(),
        "machine": f"{os.cpu_count()} x {_processor()}",
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join([f"python -m {module}", *sys.argv[1:]]),
    }


def commit() -> str:
    """The commit of this tree, with "+" if tracked files differ from it; "" outside a repository."""
    head = _git("rev-parse", "HEAD")
    return head + ("+" if head and _git("status", "--porcelain", "--untracked-files=no") else "")


def tell_records(
    records: Sequence[dict[str, Any]], show: Callable[[dict[str, Any]], str], path: Path | None
) -> None:
    """A line each for people, and all of them in the file, if one is asked for."""
    for record in records:
        print(show(record))
    if path is not None:
        write_records(path, records)


def write_records(path: Path, records: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(list(records), indent=1) + "\n")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=ROOT, check=False)
    return done.stdout.strip()
