"""`plan`: the transfer of a model to many nodes, planned but not carried out."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from cli.errors import UsageError
from cli.options import DURATION, RATE, SIZE, output_option
from cli.output import emit_record, emit_rows, write
from cli.plan_view.picture import draw
from cli.plan_view.pipelines import Foreseen, foresee
from cli.progress import note
from cli.tables import Column
from rdmacast.plan.pipelines import ExecutionPipeline
from rdmacast.plan.plan import MAX_BLOCKS, MAX_NODES, CastShape, TransferPlan
from rdmacast.plan.planners.automatic import LinkFacts, choose_planner
from rdmacast.plan.planners.catalog import PLANNERS, bound
from rdmacast.plan.topology import NodeTopology
from rdmacast.simulate.link_model import LinkModel
from rdmacast.simulate.plans import simulate

AUTOMATIC = "automatic"
DEFAULT_BLOCKS = 16
SHOWN_NODES = 8  # of a group, in a table
SHOWN_ROWS = 16
_CHUNK = 1 << 16
PIPELINE_COLUMNS = (
    Column(field="ready_step", numeric=True),
    Column(field="nodes", shrink=16),
    Column(field="chunks", heading="LAYERS [FIRST, LAST)", shrink=20),
)


@click.command("plan")
@click.option(
    "--nodes",
    type=click.IntRange(1, MAX_NODES),
    metavar="N",
    required=True,
    help="Number of nodes, sources included.",
)
@click.option(
    "--sources",
    type=click.IntRange(1),
    metavar="N",
    default=1,
    show_default=True,
    help="Number of nodes that hold the model (n0, n1, …).",
)
@click.option(
    "--blocks",
    type=click.IntRange(1, MAX_BLOCKS),
    metavar="N",
    help=f"Number of blocks of the model.  [default: {DEFAULT_BLOCKS}; with automatic: its choice]",
)
@click.option(
    "--planner",
    type=click.Choice([*PLANNERS, AUTOMATIC]),
    default="binomial",
    show_default=True,
    help="Algorithm; automatic chooses the fastest for --size and --rate.",
)
@click.option(
    "--leaves",
    type=click.IntRange(1, MAX_NODES),
    metavar="N",
    default=1,
    help="Leaf switches; node i is under leaf i modulo N. Planners of chains use them.",
)
@click.option("--size", type=SIZE, help="Size of the model, such as 26GB, to show times.")
@click.option("--rate", type=RATE, help="Bandwidth of each link in each direction, such as 400gbit.")
@click.option("--latency", "latency_s", type=DURATION, default=0.0, help="Latency of a link, such as 5us.")
@click.option(
    "--overhead",
    "overhead_s",
    type=DURATION,
    default=0.0,
    help="Processing time per block at each end, such as 10us.",
)
@click.option(
    "--restart",
    "restart_s",
    type=DURATION,
    default=0.0,
    help="Extra delay when a node switches peers (TCP: about 2ms).",
)
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw steps and nodes into this PNG file."
)
@output_option
def plan_command(
    nodes: int,
    sources: int,
    blocks: int | None,
    planner: str,
    leaves: int,
    size: int | None,
    rate: int | None,
    plot: Path | None,
    form: str,
    **delays_s: float,
) -> None:
    """Plan a transfer: which node sends which block to which, at which step. Needs no gateway.

    Steps are counted from 0; in one step a node sends at most one block and receives at most one. CSV has
    the transfers only. Pipelines are shown as they serve at the end, with each block counted as a layer;
    the first one may start earlier, with other nodes.

    \b
    Examples:
      hypercast plan --nodes 8
      hypercast plan --nodes 64 --sources 4 --blocks 64 --planner chain -o json
      hypercast plan --nodes 16 --planner automatic --size 26GB --rate 400gbit --latency 5us
      hypercast plan --nodes 8 --leaves 2 --planner automatic --size 26GB --rate 400gbit
      hypercast plan --nodes 13 --blocks 32 --plot plan.png
    """
    if sources >= nodes > 1 or sources > nodes:
        raise UsageError(
            f"--sources must be below --nodes, but {sources} of {nodes} nodes would hold the model"
        )
    if (size is None) != (rate is None):
        raise UsageError("--size and --rate go together")
    if size == 0:
        raise UsageError("--size must be above 0")
    facts = None if rate is None else LinkFacts(bytes_per_s=rate, **delays_s)
    sites = tuple(NodeTopology(leaf=f"leaf-{node % leaves}") for node in range(nodes)) if leaves > 1 else ()
    try:
        found = _plan(nodes, sources, blocks, planner, size, facts, sites)
    except ValueError as exc:
        raise UsageError(str(exc)) from exc
    if plot is not None:
        draw(found, plot)
        note(f"drawn into {plot}")
    _emit(found, form, size, facts)


def _plan(
    nodes: int,
    sources: int,
    blocks: int | None,
    planner: str,
    size: int | None,
    facts: LinkFacts | None,
    sites: tuple[NodeTopology, ...],
) -> TransferPlan:
    """Return the plan. Raises UsageError, and ValueError for more than can be planned."""
    holders = tuple(range(sources))
    if planner != AUTOMATIC:
        return PLANNERS[planner].plan(
            CastShape(nodes=nodes, sources=holders, blocks=blocks or DEFAULT_BLOCKS, sites=sites)
        )
    if size is None or facts is None:
        raise UsageError("--planner automatic needs --size and --rate")
    decision = choose_planner(
        nodes=nodes, sources=sources, nbytes=size, facts=facts, blocks=blocks, sites=sites
    )
    note(decision.reason)
    return decision.plan(nodes, holders)


def _emit(plan: TransferPlan, form: str, size: int | None, facts: LinkFacts | None) -> None:
    if form == "json":
        sys.stdout.writelines(_json(plan))
    elif form == "csv":
        sys.stdout.write("step,source,target,block\n")
        sys.stdout.writelines(_rows(plan, "%d,n%d,n%d,%d", "\n"))
        sys.stdout.write("\n")
    else:
        foreseen = foresee(plan)
        emit_record(_summary(plan, foreseen) | _times(plan, size, facts), form)
        rows = [_pipeline_row(pipeline) for pipeline in foreseen.pipelines[:SHOWN_ROWS]]
        if rows:
            write("\n")
            emit_rows(rows, PIPELINE_COLUMNS, (), form)
    sys.stdout.flush()


def _summary(plan: TransferPlan, foreseen: Foreseen) -> dict[str, Any]:
    shape = plan.shape
    complete = [int(step) for step in plan.arrivals()[list(shape.targets)].max(axis=1)]
    groups = [_names(group) for group in plan.groups[:SHOWN_ROWS]]
    return {
        "planner": plan.planner,
        "nodes": shape.nodes,
        "sources": _names(shape.sources),
        "blocks": shape.blocks,
        "groups": " | ".join([*groups, *(["…"] if len(plan.groups) > SHOWN_ROWS else [])]),
        "transfers": len(plan.transfers),
        "steps": plan.steps,
        "bound": f"{bound(shape)} steps (the fewest of any plan)",
        "first_full": f"after {min(complete)} steps" if complete else "",
        "first_pipeline": "" if foreseen.first_step is None else f"after {foreseen.first_step} steps",
        "pipelines": len(foreseen.pipelines),
    }


def _times(plan: TransferPlan, size: int | None, facts: LinkFacts | None) -> dict[str, Any]:
    """Return the times of the plan on equal links; restarts are not simulated."""
    if size is None or facts is None:
        return {}
    links = LinkModel(
        bytes_per_s=facts.bytes_per_s, latency_s=facts.latency_s, overhead_s=facts.overhead_s, in_flight=3
    )
    run = simulate(plan, links, size / plan.shape.blocks)
    return {
        "time": f"{round(run.seconds, 6):g} s (simulated)",
        "time_of_first": f"{round(run.first_full_s, 6):g} s until one node has all",
        "lower_bound": f"{round(size / facts.bytes_per_s, 6):g} s",
    }


def _pipeline_row(pipeline: ExecutionPipeline) -> dict[str, Any]:
    chunks = [f"[{first},{last})" for first, last in pipeline.chunks]
    return {
        "ready_step": pipeline.ready_step,
        "nodes": _names(pipeline.nodes),
        "chunks": " ".join(chunks[:SHOWN_NODES] + ["…"] * (len(chunks) > SHOWN_NODES)),
    }


def _names(nodes: tuple[int, ...]) -> str:
    return " ".join([f"n{node}" for node in nodes[:SHOWN_NODES]] + ["…"] * (len(nodes) > SHOWN_NODES))


def _json(plan: TransferPlan) -> Iterator[str]:
    """Yield the plan as one JSON object, in pieces: there may be millions of transfers."""
    head = {
        "planner": plan.planner,
        "nodes": [f"n{node}" for node in range(plan.shape.nodes)],
        "sources": [f"n{node}" for node in plan.shape.sources],
        "groups": [[f"n{node}" for node in group] for group in plan.groups],
        "steps": plan.steps,
    }
    yield json.dumps(head)[:-1] + ',\n"transfers": [\n'
    yield from _rows(plan, '{"step": %d, "source": "n%d", "target": "n%d", "block": %d}', ",\n")
    formed = [
        {
            "nodes": [f"n{node}" for node in pipeline.nodes],
            "chunks": [list(chunk) for chunk in pipeline.chunks],
            "ready_step": pipeline.ready_step,
        }
        for pipeline in foresee(plan).pipelines
    ]
    yield '],\n"pipelines": ' + json.dumps(formed) + "}\n"


def _rows(plan: TransferPlan, form: str, between: str) -> Iterator[str]:
    moved = plan.transfers
    for start in range(0, len(moved), _CHUNK):
        part = slice(start, start + _CHUNK)
        columns = (column[part].tolist() for column in (moved.step, moved.source, moved.target, moved.block))
        lines = between.join([form % row for row in zip(*columns, strict=True)])
        yield lines if start == 0 else between + lines
