"""Draws the records of a trace like the papers: latencies, SLO, and what is in use over time."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.harness.records import new_figure, save_figure

Row = dict[str, Any]

_COLOURS = {
    "hypercast": "tab:red",
    "hypercast-pipeline": "tab:pink",
    "stop-the-world": "tab:blue",
    "serverlessllm": "tab:gray",
    "serverlessllm-allcache": "tab:cyan",
    "faasnet": "tab:green",
    "faasnet-copies": "lightgreen",
    "nccl": "tab:orange",
    "nccl-copies": "moccasin",
    "blitzscale": "tab:purple",
    "fixed-full": "black",
    "fixed-half": "tab:brown",
    "ideal": "tab:olive",
}
_COLUMNS = 4
_KINDS = ("hot", "live", "warm", "cold")
_NO_TOKEN_S = 1e-3  # what arrives together is a gap of 0


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw a panel for each figure that the records have; runs that do not count are dashed and marked."""
    panels = [draw for draw, fields in _PANELS if all(row.get(name) for row in rows[:1] for name in fields)]
    lines = -(-len(panels) // _COLUMNS)
    figure = new_figure(5 * _COLUMNS, 4.1 * lines + 0.7)
    grid = figure.subplots(lines, _COLUMNS, squeeze=False).flatten()
    for axes, draw in zip(grid, panels, strict=False):
        draw(axes, rows)
        axes.grid(alpha=0.25)
    for axes in grid[len(panels) :]:
        axes.remove()
    handles, labels = _legend(grid, rows)
    figure.legend(handles, labels, loc="outside lower center", ncols=min(6, len(labels)), frameon=False)
    figure.suptitle(_title(rows), fontsize="large")
    save_figure(figure, path)


def _title(rows: Sequence[Row]) -> str:
    params = rows[0]["params"]
    functions = f", {params['functions']} functions" if params.get("functions", 1) > 1 else ""
    half = "" if params.get("half", "whole") == "whole" else f", {params['half']} half"
    kept = "" if params.get("sample", 1) == 1 else f"{params['sample']:.0%} of "
    says = (
        f"{kept}{params['trace']}{half} from {params['from_s']:.0f} s, {params['minutes']:g} min at "
        f"{params['speedup']:g} times its speed{functions}\n{params['emulated']}, {params['nodes']} nodes"
    )
    slower = f", {params['slower']} times slower" if params["slower"] != 1 else ", in real time"
    wrong = [row["name"] for row in rows if row.get("counts") is False]
    return says + slower + (f"\nDOES NOT COUNT: {', '.join(wrong)}" if wrong else "")


def _style(row: Row, rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "color": _COLOURS[row["name"]],
        "linewidth": 2.4 if row is rows[0] else 1.3,
        "linestyle": "--" if row.get("counts") is False else "-",
        "zorder": 3 if row is rows[0] else 2,  # the first, which is compared, is on top
    }


def _legend(grid: Sequence[Any], rows: Sequence[Row]) -> tuple[list[Any], list[str]]:
    lines = [grid[0].plot([], [], **_style(row, rows))[0] for row in rows]
    return lines, [
        f"{row['name']} (does not count)" if row.get("counts") is False else row["name"] for row in rows
    ]


def _rate(axes: Any, rows: Sequence[Row]) -> None:
    sent = [at_s for at_s, _ in rows[0]["ttft_over_time"]]
    axes.hist(sent, bins=range(int(max(sent)) + 2), color="lightgray")
    axes.set(title="requests per second", xlabel="model seconds")


def _ttft(axes: Any, rows: Sequence[Row]) -> None:
    _cdf(axes, rows, "ttft_quantiles_s", rows[0]["params"]["slo"]["ttft_s"])
    axes.set(title="TTFT, CDF", xlabel="seconds (dotted: target)")


def _tbt(axes: Any, rows: Sequence[Row]) -> None:
    _cdf(axes, rows, "tbt_quantiles_s", rows[0]["params"]["slo"]["tbt_s"])
    least = min(value for row in rows for value in row["tbt_quantiles_s"][10:] if value > _NO_TOKEN_S)
    axes.set(title="time between tokens, CDF", xlabel="seconds (dotted: target)", xlim=(least / 2, None))


def _cdf(axes: Any, rows: Sequence[Row], field: str, target_s: float) -> None:
    for row in rows:
        values = row[field]
        axes.plot(values, [at / (len(values) - 1) for at in range(len(values))], **_style(row, rows))
    axes.axvline(target_s, color="black", linestyle=":", linewidth=1)
    axes.set(xscale="log", ylim=(0, 1.02), ylabel="share")


def _slo(axes: Any, rows: Sequence[Row]) -> None:
    both = all(row.get("slo_5x_attainment") is not None and _of_full(row) for row in rows)
    _bars(axes, rows, [row["slo_attainment"] for row in rows], ".3f", height=0.4 if both else 0.75)
    if both:
        values = [row["slo_5x_attainment"] for row in rows]
        _bars(axes, rows, values, ".3f", height=0.4, shift=0.4, alpha=0.45)
    axes.set(title="SLO attainment" + (" (pale: 5 × mean)" if both else ""), xlim=(0, 1.02))


def _of_full(row: Row) -> bool:
    """Return whether five times the means are those of full provisioning, as in records of today."""
    return bool(row["slo_5x"].get("of") == "fixed-full")


def _gpu_bars(axes: Any, rows: Sequence[Row]) -> None:
    _bars(axes, rows, [row["gpu_s"] for row in rows], ".0f")
    axes.set(title="GPU seconds, allocated")


def _host_bars(axes: Any, rows: Sequence[Row]) -> None:
    _bars(axes, rows, [row["host_byte_s"] / 1e12 for row in rows], ".1f")
    axes.set(title="model copies in host memory, TB × s")


def _casts(axes: Any, rows: Sequence[Row]) -> None:
    """Draw the bytes between nodes over time, or their sum in records without their course."""
    if rows[0].get("network"):
        _network(axes, rows)
        return
    _bars(axes, rows, [row["cast_bytes"] / 1e9 for row in rows], ".0f")
    axes.set(title="bytes received by casts, GB")


def _bars(
    axes: Any, rows: Sequence[Row], values: Sequence[float], spec: str, *, height: float = 0.75, **more: float
) -> None:
    places = [place + more.get("shift", 0.0) for place in range(len(rows))]
    colours = [_COLOURS[row["name"]] for row in rows]
    axes.barh(places, values, height=height, color=colours, alpha=more.get("alpha", 1.0))
    axes.set_yticks([])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    box = {"facecolor": "white", "alpha": 0.85, "edgecolor": "none", "pad": 1.0}
    for place, row, value in zip(places, rows, values, strict=True):
        text = f"{format(value, spec)}  {row['name']}"
        across = axes.get_yaxis_transform()
        axes.text(0.01, place, text, fontsize="small", va="center", transform=across, bbox=box)


def _instances(axes: Any, rows: Sequence[Row]) -> None:
    _steps(axes, rows, "instances", 1.0)
    axes.set(title="instances on accelerators")
    axes.yaxis.get_major_locator().set_params(integer=True)


def _host(axes: Any, rows: Sequence[Row]) -> None:
    _steps(axes, rows, "host_bytes", float(rows[0]["params"]["image_bytes"]))
    axes.set(title="model copies in host memory")


def _steps(axes: Any, rows: Sequence[Row], field: str, unit: float) -> None:
    for row in rows:
        times, values = zip(*[*row[field], (row["window_s"], row[field][-1][1])], strict=True)
        axes.step(times, [value / unit for value in values], where="post", **_style(row, rows))
    axes.set(xlabel="model seconds", ylim=(0, None))


def _gpu(axes: Any, rows: Sequence[Row]) -> None:
    for row in rows:
        axes.plot(*zip(*row["gpu_cumulated"], strict=True), **_style(row, rows))
    axes.set(title="cumulated GPU seconds", xlabel="model seconds", ylim=(0, None))


def _network(axes: Any, rows: Sequence[Row]) -> None:
    for row in rows:
        if row.get("network"):
            step_s, rates = row["network"]["step_s"], row["network"]["between_nodes_bytes_s"]
            times = [place * step_s for place in range(len(rates) + 1)]
            sums = accumulate((rate * step_s / 1e9 for rate in rates), initial=0.0)
            axes.plot(times, list(sums), **_style(row, rows))
    axes.set(title="cumulated bytes between nodes, GB", xlabel="model seconds", ylim=(0, None))


def _ttft_by_rate(axes: Any, rows: Sequence[Row]) -> None:
    for row in rows:
        groups = row.get("ttft_by_rate") or []
        rates = [(one["from_per_s"] + one["to_per_s"]) / 2 for one in groups]
        axes.plot(rates, [one["ttft_p90_s"] for one in groups], marker=".", **_style(row, rows))
    axes.set(title="P90 TTFT by request rate", xlabel="requests per second", ylabel="seconds", yscale="log")


def _ttft_by_start(axes: Any, rows: Sequence[Row]) -> None:
    """Draw one group of bars for each kind of start, in the order of the legend."""
    kinds = [kind for kind in _KINDS if any(kind in row.get("ttft_by_start", {}) for row in rows)]
    width = 0.8 / len(rows)
    for place, row in enumerate(rows):
        found = [(at, row.get("ttft_by_start", {}).get(kind)) for at, kind in enumerate(kinds)]
        heights = [(at, one["ttft_p90_s"]) for at, one in found if one and one["ttft_p90_s"] is not None]
        axes.bar(
            [at + (place + 0.5) * width - 0.4 for at, _ in heights],
            [height for _, height in heights],
            width,
            color=_COLOURS[row["name"]],
        )
    axes.set_xticks(range(len(kinds)), kinds)
    axes.set(title="P90 TTFT by kind of start", ylabel="seconds")


_PANELS: Sequence[tuple[Callable[[Any, Sequence[Row]], None], Sequence[str]]] = (
    (_rate, ("ttft_over_time",)),
    (_ttft, ()),
    (_tbt, ()),
    (_slo, ()),
    (_instances, ()),
    (_gpu, ()),
    (_host, ("host_bytes",)),
    (_gpu_bars, ()),
    (_host_bars, ("host_byte_s",)),
    (_casts, ()),
    (_ttft_by_rate, ("ttft_by_rate",)),
    (_ttft_by_start, ("ttft_by_start",)),
)
