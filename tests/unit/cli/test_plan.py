"""`hypercast plan`."""

import csv
import io
import itertools
import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from cli.commands.plan import plan_command
from cli.errors import CliError
from cli.group import cli
from rdmacast.plan.planners.catalog import PLANNERS


def run(*arguments: str) -> Result:
    return CliRunner().invoke(plan_command, [*arguments])


def planned(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "-o", "json")
    assert result.exit_code == 0, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def test_one_copy_enters_each_leaf_without_a_source() -> None:
    options = (
        "--nodes",
        "8",
        "--leaves",
        "2",
        "--planner",
        "automatic",
        "--size",
        "1GiB",
        "--rate",
        "100gbit",
    )
    found = planned(*options)
    crossing = [one for one in found["transfers"] if (int(one["source"][1:]) - int(one["target"][1:])) % 2]
    blocks = 1 + max(one["block"] for one in found["transfers"])
    assert found["planner"] == "multi-chain" and len(crossing) == blocks


@pytest.mark.parametrize("planner", PLANNERS)
def test_json_holds_a_plan_that_anybody_can_check(planner: str) -> None:
    answer = planned("--nodes", "13", "--sources", "3", "--blocks", "11", "--planner", planner)
    assert list(answer) == ["planner", "nodes", "sources", "groups", "steps", "transfers", "pipelines"]
    assert answer["planner"] == planner
    assert answer["nodes"] == [f"n{node}" for node in range(13)]
    assert answer["sources"] == ["n0", "n1", "n2"]
    assert sorted(itertools.chain(*answer["groups"])) == sorted(answer["nodes"])
    held = {(source, block): 0 for source in answer["sources"] for block in range(11)}
    for transfer in answer["transfers"]:
        assert held[transfer["source"], transfer["block"]] <= transfer["step"]
        arrival = (transfer["target"], transfer["block"])
        assert arrival not in held
        held[arrival] = transfer["step"] + 1
    assert len(held) == 13 * 11 and max(held.values()) == answer["steps"]
    for pipeline in answer["pipelines"]:
        for node, (first, last) in zip(pipeline["nodes"], pipeline["chunks"], strict=True):
            assert all(held[node, block] <= pipeline["ready_step"] for block in range(first, last))


def test_the_table_tells_steps_and_first_pipeline() -> None:
    result = run("--nodes", "64", "--sources", "4", "--blocks", "64")
    lines = dict(line.split(":", 1) for line in result.stdout.splitlines()[:11])
    found = {name: value.strip() for name, value in lines.items()}
    assert found["Planner"] == "binomial" and found["Steps"] == "67"
    assert found["Bound"].startswith("67 ")
    assert found["First pipeline"] == "after 18 steps" and found["First full"] == "after 67 steps"
    assert run("--nodes", "1").exit_code == 0


@pytest.mark.parametrize(("nodes", "sources", "blocks"), [(8, 2, 16), (13, 3, 16), (8, 1, 9), (70, 4, 64)])
def test_each_target_is_in_one_pipeline(nodes: int, sources: int, blocks: int) -> None:
    """Soon where two sub-groups hold halves; by Algorithm 2 itself where a plan is large."""
    answer = planned("--nodes", str(nodes), "--sources", str(sources), "--blocks", str(blocks))
    members = [node for pipeline in answer["pipelines"] for node in pipeline["nodes"]]
    assert sorted(members) == sorted(set(answer["nodes"]) - set(answer["sources"]))
    for pipeline in answer["pipelines"]:
        edges = [0, *(last for _, last in pipeline["chunks"])]
        assert [first for first, _ in pipeline["chunks"]] == edges[:-1] and edges[-1] == blocks
    if (nodes, sources) == (8, 2):
        assert all(2 * pipeline["ready_step"] <= answer["steps"] for pipeline in answer["pipelines"])


def test_csv_holds_the_transfers() -> None:
    rows = list(csv.DictReader(io.StringIO(run("--nodes", "3", "--blocks", "2", "-o", "csv").stdout)))
    assert rows[0] == {"step": "0", "source": "n0", "target": "n1", "block": "0"}
    assert len(rows) == 4
    assert run("--nodes", "1", "-o", "csv").stdout.split() == ["step,source,target,block"]


def test_automatic_says_why_on_stderr() -> None:
    result = run(
        *("--nodes", "8", "--planner", "automatic", "--size", "128MiB", "--rate", "200mbit"),
        *("--overhead", "200us", "--restart", "2ms", "-o", "json"),
    )
    assert json.loads(result.stdout)["planner"] == "chain"
    assert result.stderr.startswith("chain, ") and result.stderr.count("\n") == 1


def test_with_size_and_rate_it_tells_times() -> None:
    result = run("--nodes", "8", "--blocks", "16", "--size", "16MB", "--rate", "1MB/s")
    lines = dict(line.split(":", 1) for line in result.stdout.splitlines() if ":" in line)
    assert (lines["Time"].strip(), lines["Lower bound"].strip()) == ("18 s (simulated)", "16 s")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nodes", "0"], "not in the range"),
        (["--nodes", "65537"], "not in the range"),
        (["--nodes", "4", "--blocks", "0"], "not in the range"),
        (["--nodes", "4", "--planner", "magic"], "not one of"),
        (["--nodes", "4", "--size", "1parsec"], "unknown unit"),
        ([], "Missing option '--nodes'"),
    ],
)
def test_bad_values_are_usage_errors(arguments: list[str], words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2 and words in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nodes", "4", "--sources", "4"], "--sources must be below --nodes"),
        (["--nodes", "1", "--sources", "2"], "--sources must be below --nodes"),
        (["--nodes", "4", "--planner", "automatic"], "needs --size and --rate"),
        (["--nodes", "4", "--size", "1GB"], "go together"),
        (["--nodes", "4", "--size", "0", "--rate", "1gbit"], "above 0"),
        (["--nodes", "65536", "--blocks", "65536"], "more than the"),
    ],
)
def test_what_cannot_be_is_a_usage_error(arguments: list[str], words: str) -> None:
    result = run(*arguments)
    assert isinstance(result.exception, CliError)
    assert result.exception.exit_code == 2 and words in str(result.exception)


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "new" / "plan.png"
    assert run("--nodes", "5", "--sources", "2", "--blocks", "4", "--plot", str(file)).exit_code == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    assert run("--nodes", "1", "--plot", str(file)).exit_code == 0


def test_the_command_is_listed() -> None:
    command = cli.get_command(click.Context(cli), "plan")
    assert command is plan_command and "plan" in cli.list_commands(click.Context(cli))
