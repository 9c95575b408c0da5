"""Draws the records of benchmarks.multicast_sim."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.records import new_figure, save_figure


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a PNG: a panel per condition of the first model, then the paper's times beside ours."""
    ours = [row for row in rows if row["params"]["simulated"]]
    model = ours[0]["params"]["model"] if ours else ""
    of_model = [row for row in ours if row["params"]["model"] == model]
    conditions = list(dict.fromkeys(row["params"]["condition"] for row in of_model))
    figure = new_figure(5 * (len(conditions) + 1), 5)
    axes = figure.subplots(1, len(conditions) + 1, squeeze=False)[0]
    for panel, condition in zip(axes, conditions, strict=False):
        of_condition = [row for row in of_model if row["params"]["condition"] == condition]
        for name, chosen in _lines(of_condition).items():
            nodes = [row["params"]["nodes"] for row in chosen]
            panel.plot(nodes, [row["others_ratio_to_limit"] for row in chosen], "o-", ms=3, label=name)
        panel.set(yscale="log", xlabel="nodes", ylabel="time / limit")
        panel.set_xscale("log", base=2)
        panel.set_title(f"{model}, {condition}" + (" (the others)" if condition == "straggler" else ""))
        panel.legend(fontsize=7)
    _bars(axes[-1], rows)
    figure.suptitle("casts on imagined links: SIMULATED, except the paper's times")
    save_figure(figure, path)


def _lines(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return, by planner, its rows with the most blocks and the fewest sources."""
    max_blocks = max((row["params"]["blocks"] for row in rows if "chosen" not in row["params"]), default=0)
    min_sources = min((row["params"]["sources"] for row in rows), default=1)
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        params = row["params"]
        if params["sources"] == min_sources and ("chosen" in params or params["blocks"] == max_blocks):
            found.setdefault(row["name"], []).append(row)
    return found


def _bars(panel: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Draw, per model, the paper's systems and our pipeline at equal node counts, over the limit."""
    papers = [row for row in rows if not row["params"]["simulated"]]
    limits = {row["params"]["model"]: row["limit_s"] for row in rows if row["params"]["simulated"]}
    labels, heights = [], []
    for paper in papers:
        model = paper["params"]["model"]
        if model in limits:
            labels.append(f"{model} {paper['name']}")
            heights.append(paper["median_s"] / limits[model])
    for row in rows:
        params = row["params"]
        is_compared = (params["nodes"], params["sources"], params.get("condition")) == (8, 1, "jitter")
        if is_compared and params["simulated"] and row["name"] in ("binomial", "chain", "tree"):
            labels.append(f"{params['model']} {row['name']}, {params['blocks']} blocks")
            heights.append(row["ratio_to_limit"])
    order = sorted(range(len(labels)), key=lambda index: labels[index], reverse=True)
    colours = ["tab:orange" if "paper" in labels[index] else "tab:blue" for index in order]
    panel.barh([labels[index] for index in order], [heights[index] for index in order], color=colours)
    panel.tick_params(axis="y", labelsize=6)
    panel.set(xlabel="time / limit at 400 Gb/s" if labels else "", title="1 to 8 nodes")
