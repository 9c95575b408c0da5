"""The parts of `make paper`: which run, again or not at all, and what is kept of them."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import zigzag
from benchmarks.ablation import command as ablation
from benchmarks.harness.processes import ROOT
from benchmarks.interference import command as interference
from benchmarks.live_picture import command as live_picture
from benchmarks.multicast import command as multicast
from benchmarks.multicast_sim import command as multicast_sim
from benchmarks.paper import command
from benchmarks.paper.parts import PARTS, Part
from benchmarks.paper.plan import InvalidPlan, State, better, faults, named, plan, state_of
from benchmarks.paper.runner import Runner, read_records
from benchmarks.scaleout import command as scaleout
from benchmarks.trace import command as trace
from benchmarks.trace_sim import command as trace_sim
from tests.fixtures.fake_benchmark import part
from tests.fixtures.patience import PATIENCE_S

PARSERS: dict[str, Callable[[Sequence[str]], Any]] = {
    "benchmarks.ablation": ablation.parse,
    "benchmarks.interference": interference.parse,
    "benchmarks.live_picture": live_picture.parse,
    "benchmarks.multicast": multicast.parse,
    "benchmarks.multicast_sim": multicast_sim.parse,
    "benchmarks.scaleout": scaleout.parse,
    "benchmarks.trace": trace.parse,
    "benchmarks.trace_sim": lambda words: trace_sim.parse_emulated(trace_sim.make_parser(), words),
    "benchmarks.zigzag": zigzag.parse,
}


RESULTS = ROOT / "benchmarks" / "results"
RECORDED = [one for one in PARTS.values() if (RESULTS / one.file).exists()]


# --- the table of parts


@pytest.mark.parametrize("one", PARTS.values(), ids=lambda one: str(one.name))
def test_a_part_is_a_run_that_its_benchmark_accepts(one: Part) -> None:
    assert one.minutes <= 15
    assert not one.after or one.after in PARTS
    if one.module in PARSERS:
        PARSERS[one.module](one.arguments)
    else:
        assert not one.arguments  # all defaults


@pytest.mark.parametrize("one", RECORDED, ids=lambda one: str(one.name))
def test_a_recorded_part_was_run_as_the_table_has_it(one: Part) -> None:
    commands = [made["params"].get("command") for made in read_records(RESULTS / one.file)]
    assert all(" ".join(one.arguments) in command for command in commands if command)


def test_repeats_are_equal_runs_of_one_source() -> None:
    three = [PARTS[f"trace-conv-12-nodes-{number}"] for number in (1, 2, 3)]
    assert {one.source for one in three} == {"trace-conv-12-nodes"}
    assert len({tuple(one.arguments) for one in three}) == 1 and len({one.file for one in three}) == 3
    assert three[0].file == "paper-trace-conv-12-nodes-1.json" and "hypercast" in three[0].expects


# --- what is there


@pytest.mark.parametrize(
    ("records", "state"),
    [
        (None, State.MISSING),
        ([], State.INCOMPLETE),
        ([{"name": "fake", "counts": True}], State.INCOMPLETE),
        ([{"name": "fake", "counts": True}, {"name": "other"}], State.DONE),
        ([{"name": "fake", "counts": False}, {"name": "other"}], State.NOT_COUNTING),
    ],
)
def test_the_state_is_that_of_the_records(records: list[dict[str, Any]] | None, state: State) -> None:
    assert state_of(part("one", expects=("fake", "other")), records) is state


def test_a_run_that_does_not_count_says_why_and_replaces_no_better_one() -> None:
    bad = {"name": "fake", "counts": False, "runs": [{"faults": ["busy"]}, {"faults": ["busy", "late"]}]}
    good = {"name": "fake", "counts": True}
    assert faults([bad, good]) == ["fake: busy: late"]
    assert better([good], [bad]) and not better([bad], [good]) and better([bad], None)
    assert better([good], [good])  # asked for again


# --- what runs

TREE = {
    one.name: one
    for one in (
        part("sim", after="trace-1-a"),
        part("trace-1-a", testbed=True),
        part("trace-1-b", testbed=True),
        part("trace-10", testbed=True),
    )
}


def states(**changed: State) -> dict[str, State]:
    return {name: changed.get(name.replace("-", "_"), State.MISSING) for name in TREE}


def names(parts: Sequence[Part]) -> list[str]:
    return [one.name for one in parts]


def test_parts_that_are_done_are_skipped_and_the_others_run() -> None:
    found = plan(TREE, states(trace_1_a=State.DONE, trace_1_b=State.NOT_COUNTING))
    assert names(found.run) == ["trace-1-b", "trace-10", "sim"]
    assert found.skipped == {"trace-1-a": "done"} and found.minutes == 3


def test_words_name_parts_by_their_first_words() -> None:
    assert names(plan(TREE, states(), asked=["trace-1"]).run) == ["trace-1-a", "trace-1-b"]
    assert names(plan(TREE, states(), asked=["trace-1-b", "trace-10"]).run) == ["trace-1-b", "trace-10"]
    with pytest.raises(InvalidPlan, match="'trac' is no part"):
        plan(TREE, states(), asked=["trac"])


def test_a_whole_name_means_that_part_alone() -> None:
    parts = {name: part(name) for name in ("trace-1", "trace-1-slow", "trace-2")}
    assert names(named(parts, ["trace-1"])) == ["trace-1"]
    assert names(named(parts, ["trace"])) == list(parts)


def test_again_runs_what_is_done_and_nothing_else() -> None:
    done = states(trace_1_a=State.DONE, trace_10=State.DONE)
    assert names(plan(TREE, done, again=["trace-10"]).run) == ["trace-10"]
    assert names(plan(TREE, done, asked=["sim"], again=["trace-10"]).run) == ["trace-10", "sim"]


def test_a_part_waits_for_the_file_that_it_reads() -> None:
    found = plan(TREE, states(), asked=["sim"])
    assert not found.run and found.skipped == {"sim": "needs trace-1-a"}
    assert names(plan(TREE, states(), asked=["sim", "trace-1"]).run) == ["trace-1-a", "trace-1-b", "sim"]


def test_without_a_testbed_the_reason_is_named() -> None:
    found = plan(TREE, states(trace_1_a=State.DONE), no_testbed="needs root")
    assert names(found.run) == ["sim"]
    assert found.skipped == {"trace-1-a": "done", "trace-1-b": "needs root", "trace-10": "needs root"}
    assert "sim" in plan(TREE, states(), no_testbed="needs root").skipped


# --- the runs


class Runs:
    """Runs of fake benchmarks in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.results, self.counter = folder / "results", folder / "runs"
        self.said: list[str] = []
        self._runner = Runner(self.results, folder / "logs", 2, self.said.append)

    def run(self, one: Part) -> State:
        parts = {one.name: one}
        found = plan(parts, {one.name: self._runner.state(one)})
        return self._runner.run(found).get(one.name, self._runner.state(one))

    @property
    def count(self) -> int:
        return len(self.counter.read_text().splitlines())


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def test_a_run_that_does_not_count_is_repeated_until_it_does(runs: Runs) -> None:
    one = part("busy", "--busy-runs", 2, "--runs", runs.counter)
    assert runs.run(one) is State.DONE and runs.count == 3
    records = read_records(runs.results / "paper-busy.json")
    assert records is not None and records[0]["counts"] is True
    assert "  does not count: fake: processors were 90% busy" in runs.said
    assert runs.run(one) is State.DONE and runs.count == 3  # nothing is left to do


def test_retries_end_and_the_file_remains_to_show_why(runs: Runs) -> None:
    one = part("busy", "--busy-runs", 9, "--runs", runs.counter)
    assert runs.run(one) is State.NOT_COUNTING and runs.count == 3
    assert faults(read_records(runs.results / "paper-busy.json") or ())
    assert runs.run(one) is State.NOT_COUNTING and runs.count == 6  # the next `make paper` tries again


def test_a_failed_run_leaves_no_file_and_shows_its_log(runs: Runs) -> None:
    one = part("failing", "--runs", runs.counter, "--status", 3)
    assert runs.run(one) is State.INCOMPLETE and runs.count == 1
    assert not runs.results.exists() and any("ended with status 3" in line for line in runs.said)


CHILD = """
from pathlib import Path
from benchmarks.paper.command import main
from tests.fixtures.fake_benchmark import part

folder = Path({folder!r})
parts = dict(slow=part("slow", "--forever", "--runs", folder / "runs"))
folders = [f"--{{name}}={{folder / name}}" for name in ("results", "logs", "page")]
main(["run", *folders], parts)
"""


def test_ctrl_c_ends_the_part_and_writes_nothing(tmp_path: Path) -> None:
    program = CHILD.format(folder=str(tmp_path))
    child = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        runs_file = tmp_path / "runs"
        wait_for(runs_file.exists, child)
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=PATIENCE_S)
    finally:
        child.kill()
    assert child.returncode == 130 and "the next run goes on" in errors
    assert not (tmp_path / "results").exists() and not (tmp_path / "page").exists()
    assert (tmp_path / "runs.ended").exists()  # the benchmark ended by itself, by SIGTERM


def wait_for(there: Callable[[], bool], child: subprocess.Popen[str]) -> None:
    while not there():
        assert child.poll() is None, child.communicate()
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.05)


def test_the_list_shows_parts_with_their_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "paper-one.json").write_text(json.dumps([{"name": "fake", "counts": True}]))
    parts = {one.name: one for one in (part("one"), part("two", testbed=True, shows="what it shows"))}
    command.main(["list", "--results", str(tmp_path)], parts)
    first, second, last = capsys.readouterr().out.splitlines()
    assert "one" in first and "done" in first
    assert "missing" in second and second.endswith("what it shows, needs root and iproute2")
    assert last == "1 of 2 to run, about 1 min"


def test_an_unknown_part_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["run", "nothing", "--results", str(tmp_path)], {"one": part("one")})
    assert "'nothing' is no part" in str(ended.value.code)
