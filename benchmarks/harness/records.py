"""The records of a run: where they come from, and how they are printed, written and drawn."""

import json as json_format
import os
import platform
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness.processes import ROOT, exit_on_sigterm

Record = dict[str, Any]


class Recording:
    """The records of one run; each is printed as it is added, if `show` formats it."""

    def __init__(self, show: Callable[[Record], str] | None = None) -> None:
        self._show = show
        self.records: list[Record] = []

    def __repr__(self) -> str:
        return f"Recording({len(self.records)} records)"

    def add(self, *records: Record) -> None:
        """Keep the records, and print a line for each."""
        for record in records:
            self.records.append(record)
            if self._show is not None:
                print(self._show(record), flush=True)


def timed(
    name: str, params: Record, seconds: Sequence[float], limit_s: float | None = None, **figures: Any
) -> Record:
    """Return a record of measured seconds with their median, beside the limit if there is one."""
    median_s = statistics.median(seconds)
    limits = {} if limit_s is None else {"limit_s": limit_s, "ratio_to_limit": median_s / limit_s}
    row = {"name": name, "params": params, "seconds": list(seconds), "median_s": median_s}
    return {**row, **limits, **figures}


def chosen(args: Namespace, *names: str) -> Record:
    """Return these options as parameters of a record."""
    return {name: getattr(args, name) for name in names}


def all_but(args: Namespace, *names: str) -> Record:
    """Return all options but these as parameters of a record; those for files are none."""
    skipped = ("json", "plot", "data_dir", *names)
    return {name: value for name, value in vars(args).items() if name not in skipped}


def new_figure(width: float, height: float) -> Any:
    """Return an empty matplotlib figure of that many inches."""
    from matplotlib.figure import Figure  # only in the extra [dev]

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure as PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, format="png")


@contextmanager
def recording(
    name: str,
    *,
    json: Path | None,
    show: Callable[[Record], str] | None = None,
    plot: Path | None = None,
    draw: Callable[[Sequence[Record], Path], None] | None = None,
    failures: tuple[type[Exception], ...] = (),
) -> Iterator[Recording]:
    """Collect the records of a run; write and draw those that exist when it ends, however it ends.

    One of `failures` ends the program with one line and status 1, Ctrl-C or SIGTERM with status 130.
    """
    exit_on_sigterm()
    kept = Recording(show)
    failure, status = "", 1
    try:
        yield kept
    except failures as error:
        failure = str(error) or type(error).__name__
    except KeyboardInterrupt:
        failure, status = "interrupted", 130
    finally:
        if json is not None and kept.records:
            write_records(json, kept.records)
        if plot is not None and draw is not None and kept.records:
            draw(kept.records, plot)
    if failure:
        print(f"{name}: {failure}", file=sys.stderr)
        sys.exit(status)


def write_records(path: Path, records: Sequence[Record]) -> None:
    """Write a result file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json_format.dumps(list(records), indent=1) + "\n")


def describe_run(module: str) -> dict[str, object]:
    """Return commit (marked if the tree differs from it), machine, load and command of this run."""
    return {
        "commit": commit(),
        "machine": f"{os.cpu_count()} x {_processor()}",
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join([f"python -m {module}", *sys.argv[1:]]),
    }


def commit() -> str:
    """Return the commit of this tree, with "+" if tracked files differ; "" outside a repository."""
    head = _git("rev-parse", "HEAD")
    return head + ("+" if head and _git("status", "--porcelain", "--untracked-files=no") else "")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=ROOT, check=False)
    return done.stdout.strip()
