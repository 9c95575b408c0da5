"""Run casts in which random nodes are killed at random times and blocks are corrupted in transit.

Starts as many processes as --nodes, which cast an image among themselves, time after time, over TCP and
shared memory, with one planner after another. In each counted cast one of them gets SIGKILL: a source
(another remains), a relay, or a target that forwards nothing, after a random fraction of the time that
undisturbed casts of the same kind take in this run. In half of them, and in some without a kill, a byte is
flipped in 1 % of the blocks that nodes read. Some killed nodes return at once, with the content of their
memory's file.

All surviving nodes must end with the image's bytes; no surviving node may be declared lost; and after each
cast every process must have the open files, tasks, regions and mapped memory that it had before its first,
and the folder in shared memory must be empty. The time lost is how much longer the last survivor needs than
undisturbed, as a fraction of that; its median must not exceed --limit.

Every node sends and receives at most --rate, so that the links are the limit, not the processors (whose share
is in the records): over TCP in the sockets, in shared memory per block. With --fault hang a node is stopped
instead, and its connections stay open, as if its cable had been pulled.

It exits with 1 if anything is wrong or the limit is exceeded, and then prints the processes' logs.

examples:
  python -m benchmarks.cast_faults --casts 200 --nodes 8 --seed 1 --json faults.json
  python -m benchmarks.cast_faults --casts 12 --nodes 5 --transport tcp --planner binomial --fault hang
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import uvloop

from benchmarks.cast_faults.fleet import Fleet
from benchmarks.cast_faults.records import records, show
from benchmarks.cast_faults.run import FaultRun, RunSetup, TrialResult
from benchmarks.cast_faults.trials import CastVariant, FaultKind, FaultMix, FaultTrial, draw_trials
from benchmarks.harness.arguments import (
    at_least,
    benchmark_parser,
    positive,
    rate,
    say,
    share,
    size,
    some_of,
)
from benchmarks.harness.crew import CrewError
from benchmarks.harness.owner import scratch_folder
from benchmarks.harness.records import Recording, chosen, describe_run, recording
from benchmarks.multicast.run import CastImage
from benchmarks.multicast.turns import print_logs_on_error
from rdmacast.plan.planners.catalog import PLANNERS

TRANSPORTS = ("tcp", "shm")
SEED = 1  # of the image
_PROGRESS_EVERY = 10
_MAX_FINDINGS = 20


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = benchmark_parser("benchmarks.cast_faults", __doc__)
    add = parser.add_argument
    add("--casts", type=at_least(1), default=200, help="casts in which a node is killed")
    add("--nodes", type=at_least(3), default=8, help="nodes with the sources")
    add("--sources", type=at_least(2), default=2, help="how many of them are sources")
    add("--size", type=size, default="16MiB", help="image size")
    add("--rate", type=rate, default="128mbit", help="rate of a node, each way")
    add("--blocks", type=at_least(1), default=64, help="blocks per cast")
    add("--transport", type=some_of(TRANSPORTS), default="tcp,shm", help="of tcp,shm")
    planners = "binomial,chain,tree,scatter-allgather"
    add("--planner", type=some_of(PLANNERS), default=planners, help=f"of {', '.join(PLANNERS)}")
    add("--fault", type=FaultKind, choices=tuple(FaultKind), default="kill", help="of the chosen node")
    add("--damage", type=share, default=0.01, help="fraction of blocks to corrupt")
    add("--undisturbed", type=at_least(1), default=3, help="undisturbed casts per kind")
    add("--limit", type=positive, default=0.3, help="allowed median of the time lost, as a fraction")
    add("--seed", type=int, default=1, help="seed of the random choices")
    args = parser.parse_args(arguments)
    if args.sources >= args.nodes:
        parser.error("--sources must be below --nodes: no target would receive anything")
    return args


def fault_mix(args: argparse.Namespace) -> FaultMix:
    return FaultMix(
        casts=args.casts,
        nodes=args.nodes,
        sources=args.sources,
        blocks=args.blocks,
        shapes=[CastVariant(transport, planner) for transport in args.transport for planner in args.planner],
        fault=args.fault,
        damage=args.damage,
        undisturbed=args.undisturbed,
    )


async def measure(args: argparse.Namespace, folder: Path, images: Path, into: list[TrialResult]) -> FaultRun:
    """Run all casts; `into` receives finished ones. Raises CrewError."""
    image = CastImage.make(args.size, SEED)
    with (folder / "nodes.log").open("wb") as log:
        async with Fleet(args.nodes, args.rate, images, log) as fleet:
            setup = RunSetup(image=image, blocks=args.blocks, sources=args.sources, images=images)
            run = FaultRun(fleet, setup)
            trials, started_s = draw_trials(fault_mix(args), args.seed), time.monotonic()
            for trial in trials:
                into.append(await run.cast(trial))
                print_progress(trials, into, run, time.monotonic() - started_s)
                if sum(len(one.wrong) for one in into) >= _MAX_FINDINGS:
                    raise CrewError(f"stopped after {_MAX_FINDINGS} findings")
    return run


def print_progress(
    trials: Sequence[FaultTrial], outcomes: Sequence[TrialResult], run: FaultRun, seconds: float
) -> None:
    """Print a progress line every few casts, and one per finding."""
    last, count = outcomes[-1], len(outcomes)
    for what in last.wrong:
        say(f"WRONG: {last.trial}: {what}")
    if count % _PROGRESS_EVERY and count < len(trials):
        return
    shares = [run.baseline.lost_share(one) for one in outcomes if one.trial.strike is not None]
    median = f"{statistics.median(shares):.1%} median time lost so far" if shares else "no fault injected yet"
    left_s = seconds / count * (len(trials) - count)
    say(f"{count} of {len(trials)} casts, {median}, about {left_s:.0f} s left")


def carry_out(args: argparse.Namespace, out: Recording) -> None:
    """Run all casts, and add their records. Raises CrewError, also for findings."""
    started_s = time.monotonic()
    outcomes: list[TrialResult] = []
    with ExitStack() as stack:
        folder = stack.enter_context(scratch_folder(Path(tempfile.gettempdir())))
        images = stack.enter_context(scratch_folder(Path("/dev/shm")))
        stack.enter_context(print_logs_on_error(folder))
        run = uvloop.run(measure(args, folder, images, outcomes))
        params = {
            **chosen(args, "nodes", "sources", "blocks", "fault", "damage", "seed"),
            "bytes": args.size,
            "rate_bytes_s": args.rate,
            "run_seconds": round(time.monotonic() - started_s, 1),
            **describe_run("benchmarks.cast_faults"),
        }
        rows = records(outcomes, run.baseline, args.limit, params)
        out.add(*rows)
        if rows[-1]["wrong"]:
            raise CrewError(f"{len(rows[-1]['wrong'])} findings (see WRONG above)")


def main() -> None:
    args = parse()
    with recording("cast_faults", json=args.json, show=show, failures=(CrewError, OSError)) as out:
        carry_out(args, out)
    if not out.records[-1]["holds"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
