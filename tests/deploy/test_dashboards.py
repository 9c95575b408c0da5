"""The dashboards as files: what Grafana needs of them, and only metrics and labels that are documented."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.promql import metrics_in

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "grafana"
HTTP = (ROOT / "docs" / "HTTP.md").read_text()
FILES = sorted(FOLDER.glob("*.json"))
WIDTH = 24


def test_there_is_one_for_each_kind_of_reader() -> None:
    assert {path.stem for path in FILES} == {"platform", "function", "tenant", "cast"}
    boards = [json.loads(path.read_text()) for path in FILES]
    assert len({board["uid"] for board in boards}) == len({board["title"] for board in boards}) == len(boards)


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def board(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(request.param.read_text())
    return found


def test_panels_have_a_place_of_their_own(board: dict[str, Any]) -> None:
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        assert at["x"] >= 0 and at["x"] + at["w"] <= WIDTH
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not taken & cells, panel["title"]
        taken |= cells
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0


def test_the_source_of_the_data_is_chosen_by_the_reader(board: dict[str, Any]) -> None:
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    used = set(re.findall(r"\$\{?(\w+)\}?", json.dumps(board["panels"]))) - {"__rate_interval"}
    assert used == variables.keys()
    for part in (*board["panels"], *(t for panel in board["panels"] for t in panel["targets"])):
        assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_it_reads_metrics_and_labels_of_the_reference(board: dict[str, Any]) -> None:
    rows = {
        name: line
        for line in HTTP.splitlines()
        if line.startswith("| `hypercast_")
        for name in re.findall(r"`(hypercast_\w+)`", line.split("|")[1])
    }
    for expression in (target["expr"] for panel in board["panels"] for target in panel["targets"]):
        read = {re.sub(r"_(bucket|count|sum)$", "", name) for name in metrics_in(expression)}
        assert read - {"up"} <= rows.keys(), expression
        for metric, selector in re.findall(r"(hypercast_\w+)\{([^}]*)\}", expression):
            row = rows.get(metric) or rows[re.sub(r"_(bucket|count|sum)$", "", metric)]
            for label in re.findall(r'(\w+)[=~!]+"', selector):
                assert f"`{label}`" in row, f"{metric} has no label {label}"


def test_variables_list_values_of_a_metric_that_exists(board: dict[str, Any]) -> None:
    selectors = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            found = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["definition"])
            assert found is not None and f"| `{found[1]}`" in HTTP
            assert any(f'{found[2]}=~"${variable["name"]}"' in expression for expression in selectors)
