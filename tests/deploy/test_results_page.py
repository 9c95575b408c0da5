"""docs/RESULTS.md is what the result files say, and every row of it can be filled."""

import copy
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.result_files import ResultFiles
from benchmarks.paper.claims import Figure, read_claims
from benchmarks.paper.headline import FROM_ZERO, LABELS, ROBUST, SCENARIOS, ZERO_COPIES
from benchmarks.paper.page import NOTHING, PAGE, page
from benchmarks.paper.parts import MODES, PARTS
from benchmarks.paper.pictures import PICTURES, draw, median_rows
from benchmarks.paper.sources import find_sources
from benchmarks.tables import RESULTS, update

Rows = list[dict[str, Any]]
BY_RATE = [{"from_per_s": 1, "to_per_s": 3, "requests": 9, "ttft_p50_s": 0.1, "ttft_p90_s": 0.4}]
NETWORK = {
    "step_s": 35.0,
    "between_nodes_bytes_s": [1e9, 5e8],
    "between_nodes_bytes": 5e10,
    "gateway_bytes": 1e7,
}
TRACE = "paper-trace-conv-8-nodes-1.json"


def read(file: str) -> Rows:
    rows: Rows = json.loads((RESULTS / file).read_text())
    return rows


def trace_rows(names: Sequence[str], gpu_s: float = 100.0) -> Rows:
    """Return records of these modes with real fields; the first takes `gpu_s`, each next one 10 s more."""
    found = []
    for place, name in enumerate(names):
        row = {**copy.deepcopy(read(TRACE)[0]), "name": name, "gpu_s": gpu_s + 10 * place}
        row |= {"decision_ms": {"p50": 20.0, "p90": 60.0, "most": 90.0}, "lowered_after_s": {"least": 0.6}}
        row |= {"ttft_by_rate": BY_RATE, "ttft_by_start": {"hot": BY_RATE[0], "cold": BY_RATE[0]}}
        row |= {"turns": 0, "starts": {"cold": 8, "warm": 2}, "slo_5x_attainment": 0.9, "network": NETWORK}
        found.append(row)
    return found


def sample(source: str, number: int) -> Rows:
    """Return the records of a part of this source as it would write them."""
    if source.startswith("trace-"):
        modes = PARTS.get(source, PARTS.get(f"{source}-1"))
        assert modes is not None
        return trace_rows(modes.expects, 100.0 + number)
    if source.startswith("scaleout-"):
        row = read("paper-scaleout-13b-k1.json")[0]
        return [{**row, "name": name} for name in (*PARTS[source].expects, "serverlessllm-ssd")]
    return read(PARTS[source].file)


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which every part has run."""
    folder = tmp_path_factory.mktemp("checkout") / "benchmarks" / "results"
    folder.mkdir(parents=True)
    for number, part in enumerate(PARTS.values()):
        (folder / part.file).write_text(json.dumps(sample(part.source, number)))
    return folder


@pytest.fixture
def checkout(tmp_path: Path) -> tuple[Path, Path]:
    """Return copies of the result files behind the page, and of the page."""
    results, docs = tmp_path / "benchmarks" / "results", tmp_path / "docs"
    results.mkdir(parents=True)
    docs.mkdir()
    for files in find_sources(RESULTS).values():
        for file in files:
            (results / file).write_bytes((RESULTS / file).read_bytes())
    copied = docs / PAGE.name
    copied.write_bytes(PAGE.read_bytes())
    return results, copied


# --- the page that is there


def test_the_page_is_what_the_files_say() -> None:
    assert page(RESULTS) == PAGE.read_text(), "run python -m benchmarks.paper write"


def test_a_copy_regenerates_byte_identically(checkout: tuple[Path, Path]) -> None:
    results, copied = checkout
    assert page(results, copied).encode() == copied.read_bytes() == page(results, copied).encode()


def test_a_figure_changed_by_hand_is_found(checkout: tuple[Path, Path]) -> None:
    results, copied = checkout
    text = copied.read_text()
    figures = list(re.finditer(r"(\d[\d.,]*)([^\d<>|\n]*<!-- figure: )", text))
    assert len(figures) > 40
    for match in figures[:: len(figures) // 3]:
        changed = f"{text[: match.start()]}{match[1]}9{text[match.end(1) :]}"
        copied.write_text(changed)
        assert page(results, copied) != changed
        differences, _ = update([copied], results, check=True)
        assert len(differences) == 1 and f"{match[1]}9" in str(differences[0])


def test_a_changed_result_changes_the_page(checkout: tuple[Path, Path]) -> None:
    results, copied = checkout
    file = find_sources(results)["scaleout-13b-k4"][0]
    rows = json.loads((results / file).read_text())
    rows[0]["half_peak_s"] *= 2
    (results / file).write_text(json.dumps(rows))
    assert page(results, copied) != copied.read_text()


def test_the_page_has_no_figure_of_our_own_without_a_marker() -> None:
    """Numbers of ours lie in the third column; there each is followed by its marker or part of a label."""
    labels = {figure.label for claim in read_claims() for figure in claim.ours}
    cells = [
        row.split(" | ")[2]
        for row in PAGE.read_text().splitlines()
        if row.startswith(("| F ", "| L ", "| B "))
    ]
    assert len(cells) > 30
    for cell in cells:
        bare = re.sub(r"-?[\d.,]+[^\d<>|\n;]*<!-- figure: [^>]*-->", "", cell)
        bare = re.sub(r"`[^`]*`", "", bare)
        for label in sorted(labels, key=len, reverse=True):
            bare = bare.replace(label, "")
        assert not re.search(r"\d", bare), cell


# --- claims


def test_every_claim_can_be_filled(complete: Path) -> None:
    sources, results = find_sources(complete), ResultFiles(complete)
    results.short_names = sources
    claims = read_claims()
    empty = [one for claim in claims for one in claim.ours if not one.cell(sources, results)]
    assert not empty
    assert all(claim.ours or claim.answer or claim.part in PARTS for claim in claims)
    assert all(one.source in sources for claim in claims for one in claim.ours)
    assert all(claim.effect.split()[0].strip(":,") in EFFECTS for claim in claims)


EFFECTS = {"flatters", "hurts", "both", "neither", "unclear"}


def test_a_complete_page_has_no_gaps(complete: Path) -> None:
    text = page(complete, complete.parents[1] / "docs.md")
    without = [claim for claim in read_claims() if claim.part or NOTHING in claim.answer]
    assert text.count(NOTHING) == len(without) and "Every part has run." in text
    for label in LABELS.values():
        assert f"| {label} |" in text


def test_every_figure_with_results_is_a_row() -> None:
    named: dict[str, set[int]] = {}
    for claim in read_claims():
        for letter, number in re.findall(r"([FLB]) Fig\. (\d+)", claim.figure):
            named.setdefault(letter, set()).add(int(number))
    assert named["F"] == {1, 2, 3, *range(7, 12)} and named["L"] == {1, 2, 3, *range(7, 19)}
    assert named["B"] == {1, 3, 4, 8, *range(17, 25)}


@pytest.mark.parametrize(("value", "mark"), [(17.9, "✗"), (18.0, "✓")])
def test_a_goal_is_marked_as_reached_or_not(tmp_path: Path, value: float, mark: str) -> None:
    ours, rival = trace_rows(["hypercast", "faasnet"])
    ours["gpu_s"], rival["gpu_s"] = 100.0 - value, 100.0
    (tmp_path / "paper-trace-conv-8-nodes-1.json").write_text(json.dumps([ours, rival]))
    text = page(tmp_path, tmp_path / "page.md")
    row = next(line for line in text.splitlines() if line.startswith("| GPU time less than FaaSNet-like |"))
    assert f"--> {mark} |" in row and f"{value} %" in row
    assert "| GPU time less than NCCL-like | up to 18.1 % (F) | at least 18 % | no run counts |" in text


def test_a_mode_that_a_part_leaves_out_is_not_one_that_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "paper-trace-7b.json").write_text(json.dumps(trace_rows(["hypercast"])))
    rows = page(tmp_path, tmp_path / "page.md").splitlines()
    assert "| GPU time less than NCCL-like | not in these runs |" in rows
    assert "| GPU time less than FaaSNet-like | no run counts |" in rows


def test_every_part_is_used() -> None:
    used = {figure.source for claim in read_claims() for figure in claim.ours}
    used |= (
        {claim.part for claim in read_claims()}
        | {*SCENARIOS, *FROM_ZERO, *ZERO_COPIES, *ROBUST}
        | {name for one in PICTURES for name in one.sources}
    )
    assert {part.source for part in PARTS.values()} <= used


def test_repeats_are_medians_with_their_spread(complete: Path) -> None:
    text = page(complete, complete.parents[1] / "docs.md")
    numbers = [place for place, part in enumerate(PARTS.values()) if part.source == "trace-code-12-nodes"]
    least, middle, greatest = (100 + number for number in numbers)
    traces = text.partition("## On traces")[2].splitlines()
    row = next(line for line in traces if line.startswith("| hypercast (default) |"))
    assert f"{middle} s ({least}–{greatest})" in row
    ratios = sorted(
        10 * MODES.index("faasnet") / (100 + number + 10 * MODES.index("faasnet")) for number in numbers
    )
    shown = f"{100 * ratios[1]:.1f} %<!-- figure: trace-code-12-nodes hypercast.gpu_s / faasnet.gpu_s"
    assert shown in text and f"({100 * ratios[0]:.1f}<!-- figure: min" in text


def test_what_does_not_count_is_listed_and_not_quoted(complete: Path, tmp_path: Path) -> None:
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    for part in PARTS.values():
        rows = json.loads((complete / part.file).read_text())
        for row in rows:
            if row["name"] == "faasnet" and part.source == "trace-conv-8-nodes":
                row |= {"counts": False, "runs": [{"faults": ["processors were 90% busy"]}]}
        (results / part.file).write_text(json.dumps(rows))
    text = page(results, tmp_path / "page.md")
    assert text.count("`: faasnet: processors were 90% busy") == 3
    assert "figure: trace-conv-8-nodes hypercast.gpu_s / faasnet" not in text
    assert "figure: trace-conv-8-nodes hypercast.gpu_s / nccl" in text
    only = Figure("", "trace-conv-8-nodes", "faasnet.gpu_s", ".0f", "")
    assert only.cell(find_sources(results), ResultFiles(results)) == ""


# --- sources and pictures


def test_a_source_has_the_files_of_those_repeats_that_have_run(tmp_path: Path) -> None:
    there = [f"paper-trace-conv-8-nodes-{number}.json" for number in (1, 3)]
    for file in there:
        (tmp_path / file).write_text("[]")
    assert find_sources(tmp_path) == {"trace-conv-8-nodes": there}


def test_a_picture_shows_the_median_run_that_counts() -> None:
    repeats = [
        [{"name": "a", "gpu_s": gpu_s, "counts": counts}]
        for gpu_s, counts in ((5.0, False), (3.0, True), (1.0, True), (2.0, True))
    ]
    assert [row["gpu_s"] for row in median_rows(repeats)] == [2.0]


def test_pictures_are_drawn_for_what_there_is(complete: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = sorted({file for files in find_sources(complete).values() for file in files})
    few = ("trace-conv-8-nodes", "trace-ablation", "sim-multicast")
    for file in files:
        if file.removeprefix("paper-").startswith(few):
            (tmp_path / file).write_bytes((complete / file).read_bytes())
    drawn = draw(tmp_path)
    assert {path.name for path in drawn} == {f"paper-{name}.png" for name in few}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


def test_the_page_shows_each_picture_of_which_there_is_a_source(complete: Path) -> None:
    shown = page(RESULTS)
    there = {one.name for one in RESULTS.glob("paper-*.png")}
    assert there and all(f"benchmarks/results/{name}" in shown for name in there)
    text = page(complete, complete.parents[1] / "docs.md")
    assert all(f"benchmarks/results/{one.file}" in text for one in PICTURES)
