"""Runs parts one after the other, each a child process, and keeps their result files."""

import json
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness.processes import ROOT, Processes, module
from benchmarks.paper.parts import Part
from benchmarks.paper.plan import Plan, Records, State, better, faults, state_of

LIMIT_MINUTES = 30.0  # of a part, which should take 15 at most
_STOP_S = 60.0  # in which a benchmark removes its testbed
_NOTE_S = 60.0
_LAST_LINES = 5


class Runner:
    """Runs the parts of a plan; result files are in `results`, logs in `logs`."""

    def __init__(self, results: Path, logs: Path, retries: int, say: Callable[[str], None]) -> None:
        self._results = results
        self._logs = logs
        self._retries = retries
        self._say = say

    def __repr__(self) -> str:
        return f"Runner({self._results})"

    def state(self, part: Part) -> State:
        """Return what there is of a part."""
        return state_of(part, read_records(self._results / part.file))

    def run(self, plan: Plan) -> dict[str, State]:
        """Run the parts, each again while its run does not count; return their states."""
        ended: dict[str, State] = {}
        remaining, started_s = plan.minutes, time.monotonic()
        for number, part in enumerate(plan.run, 1):
            spent = (time.monotonic() - started_s) / 60
            self._say(
                f"[{number}/{len(plan.run)}] {part.name}: about {part.minutes:g} min, {hours(remaining)} "
                f"remain ({hours(spent)} so far)"
            )
            ended[part.name] = self._run_with_retries(part)
            remaining -= part.minutes
        return ended

    def _run_with_retries(self, part: Part) -> State:
        path = self._results / part.file
        for attempt in range(1 + self._retries):
            began_s = time.monotonic()
            status = self._run_once(part)
            records = read_records(self._logs / part.file)
            state = state_of(part, records)
            if status and state is State.DONE:  # a benchmark with runs that do not count may exit with 1
                state = State.INCOMPLETE
            if records and state in (State.DONE, State.NOT_COUNTING) and better(records, read_records(path)):
                _keep(self._logs / part.file, path)
            self._say(f"  {state} after {(time.monotonic() - began_s) / 60:.1f} min")
            for fault in faults(records or ()):
                self._say(f"  does not count: {fault}")
            if state is not State.NOT_COUNTING:
                break
            if attempt < self._retries:
                self._say(f"  run again: {attempt + 1} of {self._retries} retries")
        return state

    def _run_once(self, part: Part) -> int:
        """Run a part once, and return its exit status; it writes its records beside its log."""
        self._logs.mkdir(parents=True, exist_ok=True)
        written, log = self._logs / part.file, self._logs / f"{part.name}.log"
        written.unlink(missing_ok=True)
        inside = written.is_relative_to(ROOT)  # the command is in the records, for others to repeat
        json_file = written.relative_to(ROOT) if inside else written
        command = module(part.module, *part.arguments, "--json", json_file)
        with Processes() as children, log.open("wb") as output:
            child = children.start(command, stdout=output, stderr=output)
            deadline_s = time.monotonic() + 60 * LIMIT_MINUTES
            noted_s = time.monotonic()
            try:
                while child.poll() is None and time.monotonic() < deadline_s:
                    time.sleep(0.2)
                    if time.monotonic() - noted_s >= _NOTE_S:
                        noted_s = time.monotonic()
                        self._say(f"  {last_line(log)}")
            finally:
                if child.poll() is None:
                    children.stop(child, _STOP_S)  # SIGTERM ends a benchmark like Ctrl-C
        if child.returncode:
            self._say(f"  ended with status {child.returncode}; the log is {log}")
            self._say("\n".join(f"    {line}" for line in _lines(log)[-_LAST_LINES:]))
        return int(child.returncode)


def read_records(path: Path) -> Records | None:
    """Return a file's records, None if there is no such file or it is broken."""
    try:
        records = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return records if isinstance(records, list) else None


def _keep(written: Path, path: Path) -> None:
    """Copy a file so that at no time there is a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    copied = path.with_suffix(".new")
    copied.write_bytes(written.read_bytes())
    copied.replace(path)


def hours(minutes: float) -> str:
    """Format a duration."""
    whole = max(0, round(minutes))
    return f"{whole // 60} h {whole % 60:02d} min" if whole >= 60 else f"{whole} min"


def last_line(log: Path) -> str:
    """Return what a log says last."""
    lines = _lines(log)
    return lines[-1] if lines else "no output yet"


def _lines(log: Path) -> list[str]:
    return [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
