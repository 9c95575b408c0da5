"""Charts of the page that no benchmark draws: the ablation, casts by size and nodes, arrivals of blocks."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.records import new_figure, save_figure
from benchmarks.scaleout.modes import GROUP_SETUP_S

Rows = Sequence[dict[str, Any]]

ABLATION_SOURCES = ("trace-ablation", "trace-conv-8-nodes")
_STEPS = (  # of the ablation: source, mode
    ("from SSD", "trace-ablation", "serverlessllm"),
    ("+ network", "trace-ablation", "faasnet"),
    ("+ multicast", "trace-ablation", "stop-the-world"),
    ("+ live", "trace-ablation", "hypercast-pipeline"),
    ("+ policy", "trace-conv-8-nodes", "hypercast-pipeline"),
)
_NODES = (4, 8, 12)
_BLOCKS = 64
_CASTS = (  # label, planner, set-up before it, colour
    ("hypercast (automatic)", "automatic", 0.0, "tab:red"),
    ("ring after 0.3 s of set-up (NCCL-like)", "chain", GROUP_SETUP_S, "tab:orange"),
    ("binary tree (FaaSNet-like)", "tree", 0.0, "tab:green"),
)
_PAPER = " (from the paper)"
_PAPERS = {"λScale": "tab:red", "NCCL": "tab:orange", "FaaSNet": "tab:green"}


def plot_ablation(rows: Mapping[str, Rows], path: Path) -> None:
    """Draw what each technique adds to the one before, on the conversation trace."""
    steps = [(label, row) for label, source, mode in _STEPS for row in rows[source] if row["name"] == mode]
    figure = new_figure(13, 4)
    for axes, (field, title, spec) in zip(
        figure.subplots(1, 3),
        (
            ("ttft_p90_s", "P90 TTFT, seconds", ".2f"),
            ("slo_attainment", "SLO attainment", ".3f"),
            ("gpu_s", "GPU seconds, allocated", ".0f"),
        ),
        strict=True,
    ):
        values = [row[field] for _, row in steps]
        bars = axes.bar(range(len(steps)), values, color=["tab:gray", *["tab:red"] * (len(steps) - 1)])
        axes.bar_label(bars, [format(value, spec) for value in values], padding=2, fontsize="small")
        axes.set_xticks(range(len(steps)), [label for label, _ in steps], fontsize="small")
        axes.set(title=title)
        axes.margins(y=0.12)
    save_figure(figure, path)


def plot_multicast(rows: Rows, path: Path) -> None:
    """Draw seconds by number of nodes, a panel for each model, and those that λScale's authors report."""
    models = list(dict.fromkeys(row["params"]["model"] for row in rows))
    figure = new_figure(13, 4.3)
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        of_model = [row for row in rows if row["params"]["model"] == model]
        nodes = [count for count in _NODES if _cast(of_model, "automatic", count) is not None]
        for place, (label, planner, setup_s, colour) in enumerate(_CASTS):
            values = [setup_s + (_cast(of_model, planner, count) or 0.0) for count in nodes]
            bars = axes.bar(
                [at + 0.27 * (place - 1) for at in range(len(nodes))], values, 0.27, label=label, color=colour
            )
            axes.bar_label(bars, [f"{value:.2f}" for value in values], padding=1, fontsize="x-small")
        for name, colour in _PAPERS.items():
            for row in of_model:
                if row["name"] == name + _PAPER and row["params"]["nodes"] in nodes:
                    at = nodes.index(row["params"]["nodes"]) + 0.27 * (list(_PAPERS).index(name) - 1)
                    style = {"color": colour, "markeredgecolor": "black", "markersize": 9}
                    axes.plot([at], [row["median_s"]], "*", **style)
        axes.set_xticks(range(len(nodes)), [f"{count} nodes" for count in nodes])
        axes.set(title=f"{model}, seconds")
        axes.margins(y=0.12)
    figure.suptitle("simulated on links of 400 Gbit/s; stars: times that λScale's authors recorded")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    save_figure(figure, path)


def plot_block_arrivals(rows: Rows, path: Path) -> None:
    """Draw the share of blocks that have arrived at all targets over time, a panel for each number of nodes.

    A plain copy of the model over one link would take until the dotted line.
    """
    casts = [row for row in rows if row.get("block_quantiles_s") and row["params"]["sources"] == 1]
    counts = sorted({row["params"]["nodes"] for row in casts})
    figure = new_figure(13, 4)
    for axes, nodes in zip(figure.subplots(1, len(counts), squeeze=False)[0], counts, strict=True):
        of_nodes = [row for row in casts if row["params"]["nodes"] == nodes]
        for row in of_nodes:
            arrived_s = row["block_quantiles_s"]
            axes.plot(
                arrived_s, [at / (len(arrived_s) - 1) for at in range(len(arrived_s))], label=row["name"]
            )
        axes.axvline(of_nodes[0]["limit_s"], color="black", linestyle=":", linewidth=1)
        axes.set(
            title=f"{nodes} nodes, one source", xlabel="seconds", ylabel="share of blocks", ylim=(0, 1.02)
        )
        axes.legend(fontsize="small", loc="lower right")
    save_figure(figure, path)


def _cast(rows: Rows, planner: str, nodes: int) -> float | None:
    """Return how long an even cast from one source takes, None if it was not simulated."""
    for row in rows:
        params = row["params"]
        even = params.get("condition") == "even" and params.get("sources") == 1
        blocks = planner == "automatic" or params.get("blocks") == _BLOCKS
        if row["name"] == planner and params["nodes"] == nodes and even and blocks:
            return float(row["median_s"])
    return None
