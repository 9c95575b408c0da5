"""Figures and tables of documents are rendered from result files, and differences are named."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.figures import render
from benchmarks.harness.result_files import FigureError, ResultFiles
from benchmarks.tables import main

RECORDS = [
    {"name": "ours", "params": {"k": 4, "mode": "alone"}, "p90_s": 0.30931, "seconds": [1.0, 3.0, 2.0]},
    {"name": "ours", "params": {"k": 8, "mode": "batched"}, "p90_s": 0.25},
    {"name": "tree", "params": {"k": 4}, "p90_s": 0.7765, "moves": [{"gap_ms": 5}, {"gap_ms": 9}]},
]
TABLE = """<!-- table
title: P90
value: p90_s .2f s
relative: ours
column: k = 4: a.json
column: alone: b.json[mode=alone]
row: we: ours
row: a tree: tree
-->
{body}<!-- /table -->
"""
BODY = """| P90 | [k = 4](results/a.json) | [alone](results/b.json) |
| --- | --- | --- |
| we | 0.31 s | 0.10 s |
| a tree | 0.78 s (2.51) | |
"""


@pytest.fixture
def results(tmp_path: Path) -> ResultFiles:
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "a.json").write_text(json.dumps(RECORDS))
    other = [{"name": "ours", "params": {"mode": "alone"}, "p90_s": 0.1}]
    (folder / "b.json").write_text(json.dumps(other))
    return ResultFiles(folder)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("a.json ours.p90_s", 0.30931),
        ("a.json .p90_s", 0.30931),
        ("a.json ours[k=8].p90_s", 0.25),
        ("a.json ours[k=8,mode=batched].params.k", 8),
        ("a.json ours.seconds.1", 3.0),
        ("a.json ours.seconds.median", 2.0),
        ("a.json ours.seconds.count * 2", 6.0),
        ("a.json tree.moves.*.gap_ms.max", 9),
        ("a.json tree.p90_s / ours.p90_s", 0.7765 / 0.30931),
        ("a.json tree.p90_s - b.json:ours.p90_s", 0.7765 - 0.1),
    ],
)
def test_a_path_finds_its_value(results: ResultFiles, expression: str, value: float) -> None:
    assert results.evaluate(expression) == pytest.approx(value)


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("c.json ours.p90_s", "cannot read"),
        ("a.json chain.p90_s", "it has ours, tree"),
        ("a.json ours[k=5].p90_s", "no record ours\\[k=5\\]"),
        ("a.json ours.p95_s", "no field 'p95_s' in name, params"),
        ("a.json ours.seconds.9", "no field '9'"),
        ("a.json ours.p90_s ** 2", "is none of"),
        ("a.json ours.p90_s /", "is not FILE PATH"),
    ],
)
def test_an_unknown_path_says_what_there_is(results: ResultFiles, expression: str, words: str) -> None:
    with pytest.raises(FigureError, match=words):
        results.evaluate(expression)


def test_figures_and_tables_are_replaced_and_the_rest_stays(results: ResultFiles, tmp_path: Path) -> None:
    mark = "<!-- figure: a.json ours.p90_s .3f -->"
    share = "<!-- figure: a.json ours.p90_s / tree.p90_s .0% -->"
    code = f"1 `2{mark}`\n```\n3{mark}\n```\n"
    old, new = TABLE.format(body="| old |\n"), TABLE.format(body=BODY)
    text = f"P90 is 0.315 s{mark}, 50%{share} of it.\n\n{old}\n{code}"
    rendered, changed, failed = render(text, tmp_path / "doc.md", results)
    expected = f"P90 is 0.309 s{mark}, 40%{share} of it.\n\n{new}\n{code}"
    assert rendered == expected and not failed
    assert [one.line for one in changed] == [1, 1, 3]
    assert "0.315 s should be 0.309 (a.json ours.p90_s .3f)" in str(changed[0])
    assert render(rendered, tmp_path / "doc.md", results) == (rendered, [], [])


def test_a_check_writes_nothing_and_names_each_difference(
    results: ResultFiles, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "doc.md"
    mark = "<!-- figure: a.json ours.p90_s .3f -->"
    text = f"one\n0.3 s{mark}\n{mark}\n<!-- table -->\n"
    document.write_text(text)
    options = ["--results", str(results.folder), str(document)]
    with pytest.raises(SystemExit) as ended:
        main(["--check", *options])
    assert ended.value.code == 1 and document.read_text() == text
    printed = capsys.readouterr().out
    assert f"{document}:2: 0.3 s should be 0.309" in printed
    assert f"{document}:3: a figure marker must follow a number" in printed
    assert f"{document}:4: a table needs" in printed
    document.write_text(text.splitlines()[1])
    main(options)
    assert document.read_text() == "0.309 s<!-- figure: a.json ours.p90_s .3f -->"
    main(["--check", *options])


def test_a_document_gives_files_short_names(results: ResultFiles, tmp_path: Path) -> None:
    names = "<!-- results\nk4: a.json\nother: b.json\n-->\n"
    table = "<!-- table\nvalue: p90_s .1f\ncolumn: one: k4\nrow: we: ours\n-->\n{body}<!-- /table -->\n"
    text = names + table.format(body="") + "1<!-- figure: k4 ours.p90_s / other:ours.p90_s .2f -->\n"
    rendered, changed, failed = render(text, tmp_path / "doc.md", results)
    assert not failed and len(changed) == 2
    assert "| we | 0.3 |" in rendered and "[one](results/a.json)" in rendered and "\n3.09<!--" in rendered


@pytest.fixture
def repeats(tmp_path: Path) -> ResultFiles:
    """Return three repeats: one has a run that does not count, one has no run of the ring."""
    for number, (ours, tree, counts) in enumerate([(2.0, 4.0, True), (3.0, 9.0, True), (1.0, 9.0, False)]):
        rows: list[dict[str, Any]] = [
            {"name": "ours", "gpu_s": ours, "counts": True},
            {"name": "tree", "gpu_s": tree, "counts": counts},
        ]
        rows[0] |= {"late_s": None if number else 7.0}
        rows += [{"name": "ring", "gpu_s": 5.0, "counts": False}] * (number > 0)
        (tmp_path / f"r{number}.json").write_text(json.dumps(rows))
    return ResultFiles(tmp_path, {"r": ["r0.json", "r1.json", "r2.json"]})


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("r ours.gpu_s", 2.0),
        ("min r ours.gpu_s", 1.0),
        ("max r ours.gpu_s", 3.0),
        ("r ours.late_s", 7.0),  # of the one that has it
        ("r tree.gpu_s", 6.5),  # of the two that count
        ("r tree.gpu_s / ours.gpu_s", 2.5),  # of the ratios, each within one repeat
        ("r2.json tree[counts=False].gpu_s", 9.0),
        ("r0.json ours.gpu_s / r:ours.gpu_s", 1.0),
    ],
)
def test_repeats_are_a_median_of_what_counts(repeats: ResultFiles, expression: str, value: float) -> None:
    assert repeats.evaluate(expression) == pytest.approx(value)


def test_what_does_not_count_is_no_figure(repeats: ResultFiles) -> None:
    with pytest.raises(FigureError, match=r"tree of r2\.json does not count"):
        repeats.evaluate("r2.json tree.gpu_s")
    with pytest.raises(FigureError, match="is null in r1"):
        repeats.evaluate("r1.json ours.late_s")
    with pytest.raises(FigureError, match="no record ring"):
        repeats.evaluate("r ring.gpu_s")
    assert repeats.has("r", "tree") and not repeats.has("r", "ring")


def test_a_column_of_repeats_has_the_spread(repeats: ResultFiles, tmp_path: Path) -> None:
    names = "<!-- results\nr: r0.json r1.json r2.json\n-->\n"
    rows = "row: ours: ours\nrow: a tree: tree\nrow: a ring: ring\n"
    table = f"<!-- table\ntitle: GPU\nvalue: gpu_s .1f s\nrelative: ours\ncolumn: all: r\n{rows}-->\n"
    rendered, _, failed = render(f"{names}{table}<!-- /table -->\n", tmp_path / "doc.md", repeats)
    assert not failed
    assert "| GPU | [all](./r0.json) [2](./r1.json) [3](./r2.json) |" in rendered
    assert "| ours | 2.0 s (1.0–3.0) |" in rendered
    assert "| a tree | 6.5 s (4.0–9.0) (2.50) |" in rendered and "| a ring | |" in rendered
