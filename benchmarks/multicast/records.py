"""Records, lines and a plot of multicast runs."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.harness.percentile import quantiles
from benchmarks.harness.records import new_figure, save_figure, timed
from benchmarks.multicast.messages import MulticastTask, block_bytes
from benchmarks.multicast.run import CastRun, MulticastContender, sum_counts
from benchmarks.multicast.turns import TurnResults
from benchmarks.testbed.link_rate import LinkMeasurement
from rdmacast.plan.plan import CastShape, TransferPlan
from rdmacast.plan.planners.catalog import PLANNERS
from rdmacast.plan.planners.subgroups import balanced
from rdmacast.plan.topology import NodeTopology
from rdmacast.simulate.link_model import LinkModel
from rdmacast.simulate.plans import simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSetting:
    """The setting of the runs: `limit_s` is the time of the fastest plain copy over a link.

    `slow` maps nodes to the fraction of the rate that their link has.
    """

    nodes: int
    nbytes: int
    limit_s: float
    slow: dict[int, float] = field(default_factory=dict)
    common: dict[str, Any] = field(default_factory=dict)


def records(turns: TurnResults, setting: RunSetting) -> list[dict[str, Any]]:
    """Return a record per contender, and one for all algorithms of `mpi`."""
    rows = [
        record(contender, runs, setting) for contender, runs in zip(turns.contenders, turns.runs, strict=True)
    ]
    ranks = [row for row in rows if row["name"] == "mpi"]
    return [row for row in rows if row["name"] != "mpi"] + ([best_of(ranks)] if ranks else [])


def link_record(
    copies: Sequence[LinkMeasurement], setting: RunSetting, round_trip_s: float = 0.0
) -> dict[str, Any]:
    """Return the record of the plain copies over one link, and of its round trip if that was measured."""
    params = {"nodes": setting.nodes, "sources": 1, **setting.common}
    trips = {"round_trip_s": round_trip_s} if round_trip_s else {}
    seconds, rate = [copy.seconds for copy in copies], setting.nbytes / setting.limit_s
    return timed("link", params, seconds, setting.limit_s, bytes_per_s=rate, **trips)


def plan_of(task: MulticastTask, nodes: int, nbytes: int) -> TransferPlan:
    """Return the plan that every node computes by itself."""
    blocks = -(-nbytes // block_bytes(nbytes, task.blocks))
    sites = tuple(NodeTopology(leaf=leaf) for leaf in task.leaves)
    shape = CastShape(nodes=nodes, sources=tuple(range(task.sources)), blocks=blocks, sites=sites)
    return PLANNERS[task.planner].plan(shape)


def record(contender: MulticastContender, runs: Sequence[CastRun], setting: RunSetting) -> dict[str, Any]:
    """Return a contender's record; times are medians over the runs in `seconds`."""
    received = (contender.nodes - contender.sources) * setting.nbytes
    params = {"nodes": contender.nodes, "sources": contender.sources, **_details(contender), **setting.common}
    figures: dict[str, Callable[[CastRun], float]] = {
        "first_full_s": lambda run: run.first_full_s,
        "skew_s": lambda run: run.skew_s,
        "bytes_per_cpu_s": lambda run: received / max(run.used.busy_s, 1e-3),
        "bytes_per_own_cpu_s": lambda run: received / max(run.own_cpu_s, 1e-3),
        "processor_share": lambda run: run.used.share,
    }
    medians = {name: statistics.median(map(figure, runs)) for name, figure in figures.items()}
    row = timed(contender.name, params, [run.seconds for run in runs], setting.limit_s, **medians)
    if setting.slow:
        row["others_s"] = statistics.median(_others_s(run, contender.sources, setting.slow) for run in runs)
    if contender.task is not None and contender.task.planner in PLANNERS:
        plan = plan_of(contender.task, contender.nodes, setting.nbytes)
        row |= _of_plan(plan, contender.task, runs, setting)
    return row


def best_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the fastest of several algorithms of one peer, with the medians of all."""
    best = min(rows, key=lambda row: row["median_s"])
    return {**best, "algorithms": {row["params"]["algorithm"]: row["median_s"] for row in rows}}


def first_pipeline_s(plan: TransferPlan, arrived_s: Sequence[Sequence[float]]) -> float:
    """Return when the first targets of all sub-groups held the chunk with which their sub-group starts.

    From then on these targets hold a whole model together.
    """
    row_of = {node: row for row, node in enumerate(plan.shape.targets)}
    groups = [[node for node in group if node in row_of] for group in plan.groups]
    groups = [group for group in groups if group]
    chunks = balanced(plan.shape.blocks, len(groups))
    ready_s = [
        min(max(arrived_s[row_of[node]][first:last], default=0.0) for node in group)
        for group, (first, last) in zip(groups, chunks, strict=True)
    ]
    return max(ready_s)


def show(row: dict[str, Any]) -> str:
    """Format a record as one line."""
    params = row["params"]
    if row["name"] == "link":
        return (
            f"{'link':18} {params['nodes']:3} nodes: {row['bytes_per_s'] * 8e-6:.1f} Mbit/s in a plain copy,"
            f" round trip {row['round_trip_s'] * 1e3:.2f} ms"
        )
    blocks = (
        f"{params['blocks']} blocks"
        if "blocks" in params
        else params.get("algorithm", "").partition(":")[0][:12]
    )
    first = f"  first block {row['first_block_s'] * 1e3:.1f} ms" if "first_block_s" in row else ""
    return (
        f"{row['name']:18} {params['nodes']:3} nodes {params['sources']:2} sources {blocks:12}"
        f" {row['median_s']:8.3f} s {row['ratio_to_limit']:6.2f} x limit{first}"
        f"  first full {row['first_full_s']:7.3f} s  skew {row['skew_s']:6.3f} s"
        f"  {row['bytes_per_own_cpu_s'] / 1e6:7.0f} MB/own CPU-s  CPU {row['processor_share']:4.0%}"
    )


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw time over the limit by number of nodes, and each contender at the most nodes, as PNG."""
    single = [row for row in rows if row["params"]["sources"] == 1 and row["name"] != "link"]
    max_nodes = max(row["params"]["nodes"] for row in rows)
    figure = new_figure(13, 4.5)
    over, bars = figure.subplots(1, 2)
    for label in dict.fromkeys(_label(row) for row in single):
        of_label = [row for row in single if _label(row) == label]
        nodes = [row["params"]["nodes"] for row in of_label]
        over.plot(nodes, [row["ratio_to_limit"] for row in of_label], "o-", label=label)
    over.axhline(1.0, color="grey", linewidth=0.8)
    over.set(xlabel="nodes, one source", ylabel="time ÷ time of one copy", yscale="log")
    over.legend(fontsize="small")
    largest = [row for row in rows if row["params"]["nodes"] == max_nodes and row["name"] != "link"]
    names = [f"{_label(row)}, k={row['params']['sources']}" for row in largest]
    bars.barh(names, [row["median_s"] for row in largest], color="tab:blue", label="all complete")
    bars.barh(names, [row["first_full_s"] for row in largest], color="tab:cyan", label="first complete")
    bars.axvline(largest[0]["limit_s"], color="crimson", linewidth=1, label="one copy")
    bars.invert_yaxis()
    bars.set(xlabel=f"seconds, {max_nodes} nodes")
    bars.legend(fontsize="small")
    save_figure(figure, path)


def _label(row: dict[str, Any]) -> str:
    blocks = row["params"].get("blocks")
    return f"{row['name']}, b={blocks}" if blocks else str(row["name"])


def _details(contender: MulticastContender) -> dict[str, Any]:
    details: dict[str, Any] = {"algorithm": contender.algorithm} if contender.algorithm else {}
    if contender.task is not None:
        details |= {"blocks": contender.task.blocks, "window": contender.task.window}
        details |= {"links": "fresh"} if contender.task.fresh_links else {}
        details |= {"processors": "apart"} if contender.task.apart else {}
    return details | ({"reason": contender.reason} if contender.reason else {})


def _others_s(run: CastRun, sources: int, slow: dict[int, float]) -> float:
    """Return when all targets with a full-rate link were complete."""
    return max(seconds for rank, seconds in enumerate(run.complete_s, start=sources) if rank not in slow)


def _median_run(runs: Sequence[CastRun]) -> CastRun:
    return sorted(runs, key=lambda run: run.seconds)[(len(runs) - 1) // 2]


def _of_plan(
    plan: TransferPlan, task: MulticastTask, runs: Sequence[CastRun], setting: RunSetting
) -> dict[str, Any]:
    """Return the fields that only our contenders have."""
    links = LinkModel(bytes_per_s=setting.nbytes / setting.limit_s, slow=setting.slow, in_flight=task.window)
    simulated = simulate(plan, links, setting.nbytes / plan.shape.blocks)
    return {
        "first_block_s": statistics.median(min(map(min, run.arrived_s)) for run in runs),
        "first_block_of_last_s": statistics.median(max(map(min, run.arrived_s)) for run in runs),
        "first_pipeline_s": statistics.median(first_pipeline_s(plan, run.arrived_s) for run in runs),
        "block_quantiles_s": quantiles(chain.from_iterable(_median_run(runs).arrived_s), 100),
        "simulated_s": simulated.seconds,
        "transports": sum_counts(run.transports for run in runs),
        "faults": sum_counts(run.faults for run in runs),
    }
