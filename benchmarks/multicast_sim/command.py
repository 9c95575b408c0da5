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

from benchmarks.harness.arguments import (
    at_least,
    benchmark_parser,
    comma_list,
    not_negative,
    positive,
    say,
    some_of,
)
from benchmarks.harness.records import Record, Recording, chosen, describe_run, recording
from benchmarks.multicast_sim.picture import draw
from benchmarks.multicast_sim.runs import (
    AUTOMATIC,
    CONDITIONS,
    MODEL_BYTES,
    SimulatedNetwork,
    SimulationCase,
    cases,
    measure,
    paper_records,
)
from rdmacast.plan.planners.catalog import PLANNERS

NAMES = (*PLANNERS, AUTOMATIC)


def run(planned: Sequence[SimulationCase], network: SimulatedNetwork, common: Record, out: Recording) -> None:
    """Add a record per case."""
    for number, case in enumerate(planned, 1):
        started_s = time.monotonic()
        row = measure(case, network)
        row["params"] |= common
        out.add(row)
        say(f"{number} of {len(planned)} ({time.monotonic() - started_s:.1f} s)")


def show(row: Record) -> str:
    """Format a record as one line."""
    params = row["params"]
    if not params["simulated"]:
        return f"{row['name']:26} {params['model']:4} {row['median_s']:8.3f} s"
    name = f"{row['name']} ({params['chosen']})" if "chosen" in params else row["name"]
    return (
        f"SIMULATED {name:26} {params['model']:4} {params['nodes']:4} nodes {params['sources']} sources "
        f"{params['blocks']:4} blocks {params['condition']:9} {row['median_s']:8.3f} s "
        f"{row['ratio_to_limit']:8.3f} x limit, the others {row['others_ratio_to_limit']:8.3f}"
    )


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
    common = chosen(args, "gbit", "latency_us", "overhead_us", "jitter", "straggler", "in_flight", "seed")
    with recording("multicast_sim", json=args.json, show=show, plot=args.plot, draw=draw) as out:
        out.add(*paper_records(args.models))
        # Only once: there are about a thousand records.
        out.records[0]["run"] = began | {"interrupted": True}
        run(planned, network, common, out)
        out.records[0]["run"]["interrupted"] = False


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = benchmark_parser("benchmarks.multicast_sim", __doc__, plot=True)
    add = parser.add_argument
    nodes = "2,4,8,16,64,256,1024,4096"
    add("--nodes", type=comma_list(at_least(1)), default=nodes, help="nodes with the sources")
    add("--sources", type=comma_list(at_least(1)), default="1", help="how many of them hold the model")
    add("--models", type=some_of(MODEL_BYTES), default=",".join(MODEL_BYTES), help="of these models")
    add("--planner", type=some_of(NAMES), default=",".join(NAMES), help="of these planners")
    add("--blocks", type=comma_list(at_least(1)), default="16,64", help="block counts of named planners")
    add("--conditions", type=some_of(CONDITIONS), default=",".join(CONDITIONS), help="of these conditions")
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
