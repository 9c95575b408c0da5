"""Draws scaleout's records like the papers: token rates over time, and the distribution of TTFT."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.records import new_figure, save_figure

_OURS = "hypercast"
_COLOURS = {
    _OURS: "tab:red",
    "stop-the-world": "tab:blue",
    "faasnet": "tab:green",
    "nccl": "tab:orange",
    "gloo": "tab:brown",
    "serverlessllm-ssd": "tab:gray",
    "serverlessllm-mixed": "tab:olive",
    "serverlessllm-memory": "tab:cyan",
    "blitzscale": "tab:purple",
    "turned": "tab:red",
    "half-turned": "tab:orange",
    "unturned": "tab:blue",
}


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw two panels per number and kind of holders; outliers are cut off."""
    cases = list(dict.fromkeys(_case(row) for row in rows))
    figure = new_figure(13, 4.6 * len(cases))
    for case, (over_time, cdf) in zip(cases, figure.subplots(len(cases), 2, squeeze=False), strict=True):
        of_case = [row for row in rows if _case(row) == case]
        for row in reversed(of_case):  # the first, which is compared, is drawn on top
            _draw(row, over_time, cdf, first=row is of_case[0])
        _draw_stairs(of_case[0], over_time)
        over_time.axvline(of_case[0]["transfer_s"], color="black", linestyle=":", linewidth=1)
        over_time.set_title(_title(of_case[0]), fontsize="medium", loc="left")
        over_time.set(xlabel="seconds since the burst (dotted: one copy over a link)")
        over_time.set(ylabel="tokens/s", ylim=(0, None))
        over_time.set(xlim=(0, 1.05 * _usual(len(row["tokens_per_s"]) * row["step_s"] for row in of_case)))
        cdf.axhline(0.9, color="black", linestyle=":", linewidth=1)
        cdf.set_title("the first tokens (dotted: P90)", fontsize="medium", loc="left")
        cdf.set(xlabel="time to first token, seconds", ylabel="share of requests", ylim=(0, 1.02))
        cdf.set(xlim=(0, 1.05 * _usual(row["seconds"][-1] for row in of_case)))
        handles, labels = cdf.get_legend_handles_labels()
        cdf.legend(handles[::-1], labels[::-1], fontsize="small", loc="lower right")
        for axes in (over_time, cdf):
            axes.grid(alpha=0.25)
    save_figure(figure, path)


def _draw(row: dict[str, Any], over_time: Any, cdf: Any, *, first: bool) -> None:
    rates, ttfts = row["tokens_per_s"], row["seconds"]
    label = f"{row['name']}, P90 {row['ttft_p90_s']:.2f} s"
    style: dict[str, Any] = {"color": _COLOURS[row["name"]], "linewidth": 2.4 if first else 1.3}
    over_time.plot([at * row["step_s"] for at in range(len(rates))], rates, **style)
    cdf.step(
        [0, *ttfts], [at / len(ttfts) for at in range(len(ttfts) + 1)], where="post", label=label, **style
    )


def _draw_stairs(row: dict[str, Any], over_time: Any) -> None:
    """Draw the profile's prediction while pipelines of loading nodes serve."""
    for stair in row["stairs"]:
        ends, rate = (stair["from_s"], stair["to_s"]), stair["predicted_tokens_per_s"]
        over_time.axvspan(*ends, color=_COLOURS[row["name"]], alpha=0.07 + 0.05 * (stair["pipelines"] % 2))
        over_time.plot(ends, (rate, rate), color="black", linestyle="--", linewidth=1.2)
    if row["stairs"]:
        over_time.plot([], [], color="black", linestyle="--", label="predicted of the pipelines (shaded)")
        over_time.legend(fontsize="small", loc="upper left")


def _case(row: dict[str, Any]) -> tuple[str, int]:
    return row["params"]["holders"], row["params"]["sources"]


def _title(row: dict[str, Any]) -> str:
    params = row["params"]
    engine = (
        params["emulated"] or f"{params['model']}, {params['image_bytes'] / 1e6:.0f} MB, on the processor"
    )
    memory = {"mixed": "memory, half of them serving"}.get(params["holders"], f"{params['holders']} memory")
    where = f"{params['sources']} of {params['nodes']} nodes with the model in {memory}"
    return f"{engine}\n{where}, {params['requests']} requests at once"


def _usual(values: Iterable[float]) -> float:
    """Return the maximum without values above three times the median."""
    known = sorted(values)
    middle = known[len(known) // 2]
    return float(max(value for value in known if value <= 3 * middle))
