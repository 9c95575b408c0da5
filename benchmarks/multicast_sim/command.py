"""How long a cast of a large model takes by each planner, in SIMULATION: no byte is moved.

Plans are carried out by discrete events on imagined links (rdmacast/simulate.py): every node has one port
that sends and receives at the link's rate; blocks have latency and a cost of their own, and nobody waits
for a step of the others. A model has 2 bytes a parameter (bfloat16): 7B is 14 GB, 13B 26 GB, 70B 140 GB.

even       all ports alike
jitter     each block takes up to the share --jitter longer, drawn anew for each
straggler  the same, and one target in the middle has the share --straggler of the rate. `others_s` is when
           all the others are complete. Plans by name do not know of it; the automatic planner does.

Figures are times in parts of `limit_s`, the image's bytes over the link's rate. `automatic` picks planner
and number of blocks itself. Rows "(from the paper)" are the seconds that λScale's authors recorded for one
to eight nodes of their cluster, real transfers with all that such have besides the links: they stand beside
the simulation to compare, and are no part of it. The first record's `run` says where all come from.

examples:
  python -m benchmarks.multicast_sim --json multicast-sim.json --plot multicast-sim.png
  python -m benchmarks.multicast_sim --nodes 8 --models 13B --blocks 8,16,32,64
  python -m benchmarks.multicast_sim --nodes 64 --sources 1,4 --planner binomial,chain --repeat 5
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.arguments import at_least, listed, not_negative, parser_of, positive, say
from benchmarks.machine import describe_machine, write_records
from benchmarks.multicast_sim_picture import draw
from benchmarks.multicast_sim_runs import (
    AUTOMATIC,
    CONDITIONS,
    MODEL_BYTES,
    PAPER_NODES,
    STRAGGLER,
    Case,
    Network,
    cases,
    measure,
    paper_records,
)
from rdmacast.planners.catalog import PLANNERS

NAMES = (*PLANNERS, AUTOMATIC)
NODES = [2, 4, 8, 16, 64, 256, 1024, 4096]


def run(planned: Sequence[Case], network: Network, rows: list[dict[str, Any]]) -> None:
    """Append a record a case, so that after Ctrl-C what was done is there."""
    for number, case in enumerate(planned, 1):
        began_s = time.monotonic()
        rows.append(measure(case, network))
        line = (
            f"{number} of {len(planned)}: {case.nodes} nodes, {case.model}, {case.planner}, {case.condition}"
        )
        say(f"{line} ({time.monotonic() - began_s:.1f} s)")


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """A table a model, condition and block count: times in parts of the limit."""
    ours = [row for row in rows if row["params"]["simulated"]]
    lines = ["SIMULATED times, in parts of the limit (image's bytes over the link's rate)"]
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
    what = "the others' time" if condition == STRAGGLER else "time of all"
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
    """Seconds of one source and eight nodes, ours simulated."""
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
    network = Network(
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
        sys.exit("multicast_sim: no number of nodes is above the number of sources")
    began = describe_machine("benchmarks.multicast_sim")
    rows: list[dict[str, Any]] = paper_records(args.models)
    interrupted = False
    try:
        run(planned, network, rows)
    except KeyboardInterrupt:
        interrupted = True
        say(f"interrupted: {len(rows)} records")
    common = _common(args)
    for row in rows:
        row["params"] |= common if row["params"]["simulated"] else {}
    rows[0]["run"] = began | {"interrupted": interrupted}  # once: there are a thousand records
    print(tables(rows))
    if args.json:
        write_records(args.json, rows)
    if args.plot:
        draw(rows, args.plot)
    sys.exit(130 if interrupted else 0)


def _common(args: argparse.Namespace) -> dict[str, Any]:
    names = ("gbit", "latency_us", "overhead_us", "jitter", "straggler", "in_flight", "seed")
    return {name: getattr(args, name) for name in names}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("benchmarks.multicast_sim", __doc__)
    add = parser.add_argument
    add("--nodes", type=listed(at_least(1)), default=NODES, help="with the sources; default: 2 to 4096")
    add(
        "--sources",
        type=listed(at_least(1)),
        default=[1],
        help="how many of them hold the model (default: 1)",
    )
    add("--models", type=listed(str, tuple(MODEL_BYTES)), default=list(MODEL_BYTES), help="default: all")
    add("--planner", type=listed(str, NAMES), default=list(NAMES), help=f"of {','.join(NAMES)}; default: all")
    add(
        "--blocks",
        type=listed(at_least(1)),
        default=[16, 64],
        help="of planners that are named (default: 16,64)",
    )
    add("--conditions", type=listed(str, CONDITIONS), default=list(CONDITIONS), help="default: all")
    add("--gbit", type=positive, default=400.0, help="rate of a port each way, Gb/s (default: 400)")
    add("--latency-us", type=not_negative, default=5.0, help="of a block, microseconds (default: 5)")
    add(
        "--overhead-us",
        type=not_negative,
        default=20.0,
        help="of the ports a block, microseconds (default: 20)",
    )
    add("--jitter", type=not_negative, default=0.1, help="default: 0.1")
    add("--straggler", type=positive, default=0.25, help="default: 0.25")
    add("--in-flight", type=at_least(1), default=3, help="pulls that a target has under way (default: 3)")
    add("--repeat", type=at_least(1), default=1, help="seeds for what is drawn (default: 1)")
    add("--seed", type=int, default=1, help="the first seed (default: 1); same seed, same figures")
    add("--json", type=Path, help="write the records to this file")
    add("--plot", type=Path, help="write a PNG to this file (needs matplotlib)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
