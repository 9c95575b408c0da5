"""`plan`: how a model would be given to many nodes, without doing it."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from cli.errors import UsageError
from cli.options import DURATION, RATE, SIZE, output_option
from cli.output import emit_record, table
from cli.plan_picture import draw
from cli.plan_pipelines import Foreseen, foresee
from rdmacast.pipelines import ExecutionPipeline
from rdmacast.plan import MAX_BLOCKS, MAX_NODES, CastShape, TransferPlan
from rdmacast.planners.automatic import LinkFacts, choose_planner
from rdmacast.planners.catalog import PLANNERS, bound
from rdmacast.simulate import Links, simulate

AUTOMATIC = "automatic"
DEFAULT_BLOCKS = 16
SHOWN_NODES = 8  # of a group, in the table
SHOWN_ROWS = 16
_CHUNK = 1 << 16


@click.command("plan")
@click.option("--nodes", type=click.IntRange(1, MAX_NODES), required=True, help="All nodes, sources too.")
@click.option(
    "--sources",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="How many hold the model: n0, n1, …",
)
@click.option(
    "--blocks",
    type=click.IntRange(1, MAX_BLOCKS),
    help=f"How many blocks the model is cut into.  [default: {DEFAULT_BLOCKS}; with automatic: its choice]",
)
@click.option("--planner", type=click.Choice([*PLANNERS, AUTOMATIC]), default="binomial", show_default=True)
@click.option("--size", type=SIZE, help="The model's size, as in 26GB: tells times too.")
@click.option("--rate", type=RATE, help="Of each link, both ways, as in 400gbit.")
@click.option("--latency", type=DURATION, default=0.0, help="Of a block on a link, as in 5us.")
@click.option("--overhead", type=DURATION, default=0.0, help="Of each block at both ends, as in 10us.")
@click.option(
    "--restart", type=DURATION, default=0.0, help="What changing partners costs a block, as in 2ms: TCP."
)
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw steps and nodes into this PNG."
)
@output_option
def plan_command(
    nodes: int,
    sources: int,
    blocks: int | None,
    planner: str,
    size: int | None,
    rate: int | None,
    latency: float,
    overhead: float,
    restart: float,
    plot: Path | None,
    form: str,
) -> None:
    """Show who would send which block to whom, at which step. Needs no gateway.

    Steps are counted from 0; in one, a node sends at most one block and receives at most one. As CSV,
    the transfers alone. Pipelines are told as they serve in the end, each block counting as a layer; the
    first one may begin earlier, with other nodes.

    \b
    Examples:
      hypercast plan --nodes 8
      hypercast plan --nodes 64 --sources 4 --blocks 64 --planner chain -o json
      hypercast plan --nodes 16 --planner automatic --size 26GB --rate 400gbit --latency 5us
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
    facts = (
        None
        if rate is None
        else LinkFacts(bytes_per_s=rate, latency_s=latency, overhead_s=overhead, restart_s=restart)
    )
    try:
        found = _plan(nodes, sources, blocks, planner, size, facts)
    except ValueError as exc:
        raise UsageError(str(exc)) from exc
    if plot is not None:
        draw(found, plot)
        sys.stderr.write(f"drawn into {plot}\n")
    _emit(found, form, size, facts)


def _plan(
    nodes: int, sources: int, blocks: int | None, planner: str, size: int | None, facts: LinkFacts | None
) -> TransferPlan:
    """Raises UsageError, and ValueError for more than can be planned."""
    holders = tuple(range(sources))
    if planner != AUTOMATIC:
        return PLANNERS[planner].plan(
            CastShape(nodes=nodes, sources=holders, blocks=blocks or DEFAULT_BLOCKS)
        )
    if size is None or facts is None:
        raise UsageError("--planner automatic needs --size and --rate")
    decision = choose_planner(nodes=nodes, sources=sources, nbytes=size, facts=facts, blocks=blocks)
    sys.stderr.write(f"{decision.reason}\n")
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
        emit_record(_summary(plan, foreseen) | _times(plan, size, facts), "table")
        rows = [_pipeline_row(pipeline) for pipeline in foreseen.pipelines[:SHOWN_ROWS]]
        if rows:
            sys.stdout.write("\n" + table(rows, tuple(rows[0])))
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
        "bound": f"{bound(shape)} (the fewest that any plan takes)",
        "first_full": f"after {min(complete)} steps" if complete else "",
        "first_pipeline": "" if foreseen.first_step is None else f"after {foreseen.first_step} steps",
        "pipelines": len(foreseen.pipelines),
    }


def _times(plan: TransferPlan, size: int | None, facts: LinkFacts | None) -> dict[str, Any]:
    """What the plan takes on links that all are as told; restarts are not simulated."""
    if size is None or facts is None:
        return {}
    links = Links(
        bytes_per_s=facts.bytes_per_s, latency_s=facts.latency_s, overhead_s=facts.overhead_s, in_flight=3
    )
    run = simulate(plan, links, size / plan.shape.blocks)
    return {
        "simulated_s": round(run.seconds, 6),
        "first_full_s": round(run.first_full_s, 6),
        "limit_s": round(size / facts.bytes_per_s, 6),
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
    """The plan as one JSON object, in pieces: there may be millions of transfers."""
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
