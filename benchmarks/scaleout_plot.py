"""Draws what scaleout measured, as the papers do: tokens a second over time, and the TTFT's distribution."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """For each number and kind of holders two pictures; who is slow beyond the others runs out of them."""
    from matplotlib.figure import Figure  # in the extra [dev] alone

    cases = list(dict.fromkeys(_case(row) for row in rows))
    figure = Figure(figsize=(13, 4 * len(cases)), layout="constrained")
    for case, (over_time, cdf) in zip(cases, figure.subplots(len(cases), 2, squeeze=False), strict=True):
        of_case = [row for row in rows if _case(row) == case]
        for row in of_case:
            rates, ttfts = row["tokens_per_s"], row["seconds"]
            style: dict[str, Any] = {"label": row["name"], "linewidth": 2.5 if row is of_case[0] else 1.2}
            over_time.plot([at * row["step_s"] for at in range(len(rates))], rates, **style)
            cdf.plot([0, *ttfts], [at / len(ttfts) for at in range(len(ttfts) + 1)], **style)
        over_time.axvline(of_case[0]["transfer_s"], color="grey", linestyle=":", linewidth=1)
        over_time.set(title=_title(of_case[0]), xlabel="seconds (dotted: one copy over a link)")
        over_time.set(
            ylabel="tokens/s",
            xlim=(0, 1.1 * _usual(len(row["tokens_per_s"]) * row["step_s"] for row in of_case)),
        )
        cdf.set(xlabel="time to first token, seconds", ylabel="share of requests")
        cdf.set(xlim=(0, 1.1 * _usual(row["seconds"][-1] for row in of_case)))
        cdf.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, format="png")


def _case(row: dict[str, Any]) -> tuple[str, int]:
    return row["params"]["holders"], row["params"]["sources"]


def _title(row: dict[str, Any]) -> str:
    params = row["params"]
    engine = (
        params["emulated"] or f"{params['model']}, {params['image_bytes'] / 1e6:.0f} MB, on the processor"
    )
    where = f"{params['sources']} of {params['nodes']} nodes with the model in {params['holders']} memory"
    return f"{engine}\n{where}, {params['requests']} requests at once"


def _usual(values: Any) -> float:
    """The most, but for those beyond three times the middle."""
    known = sorted(values)
    middle = known[len(known) // 2]
    return float(max(value for value in known if value <= 3 * middle))
