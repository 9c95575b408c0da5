"""A transfer plan as a picture: the block that each node receives at each step."""

from pathlib import Path

import numpy as np

from cli.errors import CliError
from cli.plan_view.pipelines import foresee
from rdmacast.plan.plan import TransferPlan

MAX_LABELS = 40


def draw(plan: TransferPlan, path: Path) -> None:
    """Write a plan as PNG. Raises CliError where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure  # only in the extra [dev]
    except ImportError as exc:
        raise CliError("--plot needs matplotlib: pip install matplotlib") from exc

    shape, moved = plan.shape, plan.transfers
    lines = [node for group in plan.groups for node in group]
    place = np.empty(shape.nodes, dtype=np.int64)
    place[lines] = np.arange(shape.nodes)
    arrived = np.full((shape.nodes, max(1, plan.steps)), np.nan)
    arrived[place[moved.target], moved.step] = moved.block
    figure = Figure(figsize=(11, min(12.0, 2.5 + 0.22 * shape.nodes)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(
        np.ma.masked_invalid(arrived), aspect="auto", interpolation="nearest", cmap="viridis", vmin=0
    )
    figure.colorbar(image, ax=axes, label="block received")
    first_step = foresee(plan).first_step
    if first_step is not None:
        axes.axvline(first_step - 0.5, color="crimson", linewidth=1, label="first pipeline")
        axes.legend(loc="upper left")
    for edge in np.cumsum([len(group) for group in plan.groups])[:-1]:
        axes.axhline(edge - 0.5, color="grey", linewidth=0.8)
    if shape.nodes <= MAX_LABELS:
        axes.set_yticks(range(shape.nodes), [f"n{node}" for node in lines])
    title = (
        f"{plan.planner}: {shape.nodes} nodes, {len(shape.sources)} of them sources, {shape.blocks} blocks"
    )
    axes.set(xlabel="step", ylabel="node, by sub-group", title=f"{title}, {plan.steps} steps")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, format="png")
