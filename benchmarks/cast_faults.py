"""Casts in which a random node is killed at a random moment and blocks are damaged on their way.

`python -m benchmarks.cast_faults --casts 200 --nodes 8 --seed 1 --json FILE` starts as many processes, which
cast an image among themselves, time after time, by TCP and by shared memory, with one planner after the
other. In each of these casts one of them gets SIGKILL: a source (another is left), a relay, or a target that
passes nothing on, after a random share of the time that undisturbed casts of the same shape take in the same
run. In half of them, and in some without a kill, a byte is flipped in 1 % of the blocks that nodes read. At
times the killed node comes back at once, with what it had kept in its memory's file.

All that live must end with the image's bytes, whatever the checks found; nobody that lives may be given up;
and after each cast every process must have the open files, tasks, regions and mapped memory that it had
before its first, and the folder in shared memory must be empty. The time lost is what the last of those that
live needs longer than undisturbed, as a share of that; its median may be --limit.

Every node sends and receives at most --rate, so that the links are the limit and not the processors (whose
share is in the records): by TCP as the sockets are read and written, in shared memory block by block.
With --fault hang a node is stopped instead, and its connections stay open, as if its cable had been pulled.

It exits with 1 if anything is wrong or the limit is passed, and shows the processes' logs then.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.arguments import at_least, listed, parser_of, positive, rate, say, share, size
from benchmarks.cast_faults_draw import Deck, Fault, Shape, Trial, draw
from benchmarks.cast_faults_fleet import Fleet
from benchmarks.cast_faults_records import records, table
from benchmarks.cast_faults_run import FaultRun, Outcome, Setup
from benchmarks.crew import CrewError
from benchmarks.endings import end_politely
from benchmarks.machine import describe_machine, write_records
from benchmarks.multicast_run import CastImage
from benchmarks.multicast_turns import logs_shown
from benchmarks.owner import own_folder
from rdmacast.planners.catalog import PLANNERS

TRANSPORTS = ("tcp", "shm")
SEED = 1  # of the image
_TOLD_EVERY = 10
_HOPELESS = 20


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of("benchmarks.cast_faults", __doc__)
    add = parser.add_argument
    add("--casts", type=at_least(1), default=200, help="in which a node is killed (default 200)")
    add("--nodes", type=at_least(3), default=8, help="with the sources (default 8)")
    add("--sources", type=at_least(2), default=2, help="of these (default 2)")
    add("--size", type=size, default="16MiB", help="of the image (default 16MiB)")
    add("--rate", type=rate, default="128mbit", help="of a node, each way (default 128mbit)")
    add("--blocks", type=at_least(1), default=64, help="of a cast (default 64)")
    add("--transport", type=listed(str, TRANSPORTS), default="tcp,shm", help="default tcp,shm")
    add(
        "--planner",
        type=listed(str, tuple(PLANNERS)),
        default="binomial,chain,tree,scatter-allgather",
        help=f"of {', '.join(PLANNERS)} (default %(default)s)",
    )
    add("--fault", type=Fault, choices=tuple(Fault), default=Fault.KILL, help="default kill")
    add("--damage", type=share, default=0.01, help="share of blocks that are damaged (default 0.01)")
    add("--undisturbed", type=at_least(1), default=3, help="casts of each shape (default 3)")
    add("--limit", type=positive, default=0.3, help="share of the time to lose in the median (default 0.3)")
    add("--seed", type=int, default=1)
    add("--json", type=Path, help="write the records to this file")
    args = parser.parse_args(arguments)
    if args.sources >= args.nodes:
        parser.error("--sources must be fewer than --nodes: nobody would receive anything")
    return args


def deck_of(args: argparse.Namespace) -> Deck:
    return Deck(
        casts=args.casts,
        nodes=args.nodes,
        sources=args.sources,
        blocks=args.blocks,
        shapes=[Shape(transport, planner) for transport in args.transport for planner in args.planner],
        fault=args.fault,
        damage=args.damage,
        undisturbed=args.undisturbed,
    )


async def measure(args: argparse.Namespace, folder: Path, images: Path, into: list[Outcome]) -> FaultRun:
    """All casts; `into` has those that are over. Raises CrewError."""
    image = CastImage.make(args.size, SEED)
    with (folder / "nodes.log").open("wb") as log:
        async with Fleet(args.nodes, args.rate, images, log) as fleet:
            setup = Setup(image=image, blocks=args.blocks, sources=args.sources, images=images)
            run = FaultRun(fleet, setup)
            trials, began_s = draw(deck_of(args), args.seed), time.monotonic()
            for trial in trials:
                into.append(await run.cast(trial))
                tell(trials, into, run, time.monotonic() - began_s)
                if sum(len(one.wrong) for one in into) >= _HOPELESS:
                    raise CrewError("too much is wrong to go on")
    return run


def tell(trials: Sequence[Trial], outcomes: Sequence[Outcome], run: FaultRun, seconds: float) -> None:
    """A line at times, and for what is wrong."""
    last, count = outcomes[-1], len(outcomes)
    for what in last.wrong:
        say(f"WRONG: {last.trial}: {what}")
    if count % _TOLD_EVERY and count < len(trials):
        return
    shares = [run.baseline.lost_share(one) for one in outcomes if one.trial.strike is not None]
    median = f"{statistics.median(shares):.1%} lost in the median so far" if shares else "none struck yet"
    left_s = seconds / count * (len(trials) - count)
    say(f"{count} of {len(trials)} casts, {median}, about {left_s:.0f} s left")


def carry_out(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The records of all casts, printed and written. Raises CrewError, also where something is wrong."""
    began_s = time.monotonic()
    outcomes: list[Outcome] = []
    with ExitStack() as stack:
        folder = stack.enter_context(own_folder(Path(tempfile.gettempdir())))
        images = stack.enter_context(own_folder(Path("/dev/shm")))
        stack.enter_context(logs_shown(folder))
        run = uvloop.run(measure(args, folder, images, outcomes))
        params = {
            "nodes": args.nodes,
            "sources": args.sources,
            "bytes": args.size,
            "rate_bytes_s": args.rate,
            "blocks": args.blocks,
            "fault": args.fault,
            "damage": args.damage,
            "seed": args.seed,
            "run_seconds": round(time.monotonic() - began_s, 1),
            **describe_machine("benchmarks.cast_faults"),
        }
        rows = records(outcomes, run.baseline, args.limit, params)
        print(table(rows))
        if args.json:
            write_records(args.json, rows)
        if rows[-1]["wrong"]:
            raise CrewError(f"{len(rows[-1]['wrong'])} things are wrong")
    return rows


def main() -> None:
    end_politely()
    args = parse()
    try:
        rows = carry_out(args)
    except (CrewError, OSError) as error:
        sys.exit(f"cast_faults: {error}")
    except (KeyboardInterrupt, asyncio.CancelledError):
        say("cast_faults: interrupted")
        sys.exit(130)
    if not rows[-1]["holds"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
