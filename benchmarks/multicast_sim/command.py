"""Simulate how long a cast of a large model takes with each planner; no byte is moved.

Plans run as discrete events on imagined links (`rdmacast/simulate`): every node has one port that sends and
receives at the link's rate, blocks have latency and a fixed cost, and no node waits for other nodes' steps.
A model has 2 bytes per parameter (bfloat16): 7B is 14 GB, 13B 26 GB, 70B 140 GB.

even       all ports are equal
jitter     each block takes up to the fraction --jitter longer, drawn per block
straggler  the same, and one target in the middle has the fraction --straggler of the rate. `others_s` is when
           all others are complete. Named planners do not know of it, the automatic planner does.

Times are multiples of `limit_s`, the image's bytes over the link's rate. `automatic` chooses planner and
block count itself. Rows "(from the paper)" are the seconds that λScale's authors recorded for one to eight
nodes of their cluster: real transfers with all their overheads, shown for comparison. The first record's
`run` has the provenance of all.

examples:
  python -m benchmarks.multicast_sim --json multicast-sim.json --plot multicast-sim.png
  python -m benchmarks.multicast_sim --nodes 8 --models 13B --blocks 8,16,32,64
  python -m benchmarks.multicast_sim --nodes 64 --sources 1,4 --planner binomial,chain --repeat 5
"""

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.harness.arguments import at_least, benchmark_parser, comma_list, not_negative, positive, say
from benchmarks.harness.records import chosen, describe_run, recording
from benchmarks.multicast_sim.picture import draw
from benchmarks.multicast_sim.runs import (
    AUTOMATIC,
    CONDITIONS,
    MODEL_BYTES,
    PAPER_NODES,
    STRAGGLER,
    SimulatedNetwork,
    SimulationCase,
    cases,
    measure,
    paper_records,
)
from rdmacast.plan.planners.catalog import PLANNERS

NAMES = (*PLANNERS, AUTOMATIC)


def run(planned: Sequence[SimulationCase], network: SimulatedNetwork, rows: list[dict[str, Any]]) -> None:
    """Append a record per case, so that an interrupted run keeps its finished ones."""
    for number, case in enumerate(planned, 1):
        started_s = time.monotonic()
        rows.append(measure(case, network))
        line = (
            f"{number} of {len(planned)}: {case.nodes} nodes, {case.model}, {case.planner}, {case.condition}"
        )
        say(f"{line} ({time.monotonic() - started_s:.1f} s)")


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """Format a table per model, condition and block count: times as multiples of the limit."""
    ours = [row for row in rows if row["params"]["simulated"]]
    lines = ["SIMULATED times, as multiples of the limit (image bytes over the link's rate)"]
    for key in dict.fromkeys(_key(row) for row in ours if row["name"] != AUTOMATIC):
        lines += ["", *_table(key, [row for row in ours if _belongs(row, key)])]
    return "\n".join([*lines, *_beside_the_paper(rows)])


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    params = row["params"]
    return params["model"], params["condition"], params["sources"], params["blocks"]


def _belongs(row: dict[str, Any], key: tuple[Any, ...]) -> bool:
    return _key(row)[:3] == key[:3] and (row["name"] == AUTOMATIC or _key(row) == key)


def _table(key: tuple[Any, ...], rows: Sequence[dict[str, Any]]) -> list[str]:
    model, condition, sources, blocks = key
    what = "time of the others" if condition == STRAGGLER else "time of all"
    size = f"{MODEL_BYTES[model] / 1e9:g} GB"
    nodes = sorted({row["params"]["nodes"] for row in rows})
    found = [f"{model} ({size}), {condition}, {sources} source(s), {blocks} blocks: {what}"]
    found.append(f"{'nodes':18}" + "".join(f"{count:>9}" for count in nodes))
    for name in dict.fromkeys(row["name"] for row in rows):
        of = {row["params"]["nodes"]: row["others_ratio_to_limit"] for row in rows if row["name"] == name}
        cells = (
            f"{of[count]:9.{3 if of[count] < 100 else 0}f}" if count in of else " " * 9 for count in nodes
        )
        found.append(f"{name:18}" + "".join(cells))
    return found


def _beside_the_paper(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Format the seconds of one source and eight nodes, with ours simulated."""
    lines = []
    for model in MODEL_BYTES:
        papers = [row for row in rows if not row["params"]["simulated"] and row["params"]["model"] == model]
        ours = [row for row in rows if row["params"]["simulated"] and row["params"]["model"] == model]
        ours = [row for row in ours if (row["params"]["nodes"], row["params"]["sources"]) == (PAPER_NODES, 1)]
        if not papers or not ours:
            continue
        limit_s = ours[0]["limit_s"]
        lines += ["", f"{model}, 1 to {PAPER_NODES} nodes, seconds (limit {limit_s:.3f})"]
        lines += [f"{row['median_s']:9.3f}  {row['name']}" for row in papers]
        lines += [f"{row['median_s']:9.3f}  {_described(row)}, simulated" for row in ours]
    return lines


def _described(row: dict[str, Any]) -> str:
    params = row["params"]
    chosen = f" ({params['chosen']})" if "chosen" in params else ""
    return f"{row['name']}{chosen}, {params['blocks']} blocks, {params['condition']}"


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    network = SimulatedNetwork(
        bytes_per_s=args.gbit * 1e9 / 8,
        latency_s=args.latency_us / 1e6,
        overhead_s=args.overhead_us / 1e6,
        jitter=args.jitter,
        straggler=args.straggler,
        in_flight=args.in_flight,
        seeds=tuple(range(args.seed, args.seed + args.repeat)),
    )
    planned = list(cases(args.planner, args.models, args.nodes, args.sources, args.blocks, args.conditions))
    if not planned:
        sys.exit("multicast_sim: --nodes must exceed --sources at least once")
    began = describe_run("benchmarks.multicast_sim")
    with recording("multicast_sim", json=args.json, plot=args.plot, draw=draw) as out:
        out.add(*paper_records(args.models))
        interrupted = True
        try:
            run(planned, network, out.records)
            interrupted = False
        finally:
            names = ("gbit", "latency_us", "overhead_us", "jitter", "straggler", "in_flight", "seed")
            common = chosen(args, *names)
            for row in out.records:
                row["params"] |= common if row["params"]["simulated"] else {}
            # Only once: there are about a thousand records.
            out.records[0]["run"] = began | {"interrupted": interrupted}
            print(tables(out.records))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = benchmark_parser("benchmarks.multicast_sim", __doc__, plot=True)
    add = parser.add_argument
    add(
        "--nodes",
        type=comma_list(at_least(1)),
        default="2,4,8,16,64,256,1024,4096",
        help="nodes with the sources",
    )
    add("--sources", type=comma_list(at_least(1)), default="1", help="how many of them hold the model")
    add(
        "--models",
        type=comma_list(str, tuple(MODEL_BYTES)),
        default=",".join(MODEL_BYTES),
        help="comma-separated models",
    )
    add("--planner", type=comma_list(str, NAMES), default=",".join(NAMES), help="of these planners")
    add("--blocks", type=comma_list(at_least(1)), default="16,64", help="block counts of named planners")
    add(
        "--conditions",
        type=comma_list(str, CONDITIONS),
        default=",".join(CONDITIONS),
        help="of even,jitter,straggler",
    )
    add("--gbit", type=positive, default=400.0, help="rate of a port each way, Gb/s")
    add("--latency-us", type=not_negative, default=5.0, help="latency of a block, microseconds")
    add("--overhead-us", type=not_negative, default=20.0, help="fixed cost per block and port, microseconds")
    add("--jitter", type=not_negative, default=0.1, help="fraction by which a block takes longer")
    add("--straggler", type=positive, default=0.25, help="the straggler's fraction of the rate")
    add("--in-flight", type=at_least(1), default=3, help="concurrent pulls of a target")
    add("--repeat", type=at_least(1), default=1, help="number of seeds")
    add("--seed", type=int, default=1, help="first seed; equal seeds give equal figures")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
