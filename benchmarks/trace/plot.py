"""Draws the records of a trace like the papers: latencies, SLO, and GPUs over time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.records import new_figure, save_figure

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


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw six panels: requests, TTFT, TBT, SLO, instances and cumulated GPU time."""
    figure = new_figure(17, 9)
    (rate, ttft, tbt), (slo, instances, gpu) = figure.subplots(2, 3)
    params = rows[0]["params"]
    _rate(rate, rows[0])
    for row in reversed(rows):  # the first, which is compared, is drawn on top
        style: dict[str, Any] = {"color": _COLOURS[row["name"]], "linewidth": 2.2 if row is rows[0] else 1.2}
        _cdf(ttft, row["ttft_quantiles_s"], label=row["name"], **style)
        _cdf(tbt, row["tbt_quantiles_s"], **style)
        times, counts = zip(*[*row["instances"], (row["window_s"], row["instances"][-1][1])], strict=True)
        instances.step(times, counts, where="post", **style)
        gpu.plot(*zip(*row["gpu_cumulated"], strict=True), **style)
    for axes, name, target in (
        (ttft, "time to first token", "ttft_s"),
        (tbt, "time between tokens", "tbt_s"),
    ):
        axes.axvline(params["slo"][target], color="black", linestyle=":", linewidth=1)
        axes.set(xlabel=f"{name}, s (dotted: target)", ylabel="share", ylim=(0, 1.02), xscale="log")
    tbt.set(xlim=(1e-3, None))  # what arrives together is a gap of 0
    ttft.legend(fontsize="small", loc="lower right")
    names = [row["name"] for row in rows]
    slo.barh(names, [row["slo_attainment"] for row in rows], color=[_COLOURS[name] for name in names])
    slo.set(xlabel="SLO attainment", xlim=(0, 1))
    slo.invert_yaxis()
    instances.set(xlabel="model seconds", ylabel="instances on accelerators", ylim=(0, None))
    gpu.set(xlabel="model seconds", ylabel="cumulated GPU seconds", ylim=(0, None))
    for axes in (rate, ttft, tbt, slo, instances, gpu):
        axes.grid(alpha=0.25)
    where = f"{params['emulated']}, {params['nodes']} nodes, {params['slower']} times slower"
    figure.suptitle(
        f"{params['trace']} from {params['from_s']:.0f} s, {params['minutes']:g} min, "
        f"{params['speedup']:g}x: {where}"
    )
    save_figure(figure, path)


def _rate(axes: Any, row: dict[str, Any]) -> None:
    sent = [at_s for at_s, _ in row["ttft_over_time"]]
    axes.hist(sent, bins=range(int(max(sent)) + 2), color="tab:gray")
    axes.set(xlabel="model seconds", ylabel="requests per second")


def _cdf(axes: Any, values: Sequence[float], **style: Any) -> None:
    axes.plot(values, [at / (len(values) - 1) for at in range(len(values))], **style)
