"""Casts of a model to many nodes: ours with any planner, gloo and Open MPI, over links of a known rate.

For each number of nodes this makes so many hosts on this machine (network namespaces, links shaped both
ways: benchmarks/testbed.py; needs root and iproute2), starts all contenders there and takes them in turns.
Every cast's bytes are checked afterwards. In each turn one plain copy between two hosts is timed, too: the
fastest of these is `limit_s`, what a link needs for the size.

A record a planner, number of blocks, of nodes and of sources, and a peer (`gloo`, `mpi`, `nixl`; one source):
median_s         from the first process that begins until the last target holds everything
first_full_s     until the first target does; skew_s is the time between the two
first_pipeline_s until one target of each sub-group holds the chunk that its sub-group begins with: these
                 targets can then serve together (ours alone)
simulated_s      what rdmacast/simulate.py says of the plan at the measured rate (ours alone)
bytes_per_cpu_s  bytes that targets got, by second of processor time of the whole machine; of the contender's
                 own processes in bytes_per_own_cpu_s, which other work on the machine does not change, but
                 which lacks what the kernel does in interrupts
processor_share  of the machine's processors; near 1, the processor was measured and not the links

`mpi` is the fastest of the algorithms of --mpi-algorithms. With --transport shm there are no links: nodes on
this host read each other's memory, beside plain copies by as many processes (`copy`), and copies of which
each unit is checked while it is in the cache (`copy-checked` from a mapping, `read-checked` by reads of the
file; the lower of their medians is `limit_s` there).

  sudo python -m benchmarks.multicast --nodes 2,4,8,12 --sources 1,2,4 --json m.json --plot m.png
  sudo python -m benchmarks.multicast --nodes 8 --planner binomial,chain --blocks 64,128,256 --rate 400mbit
  sudo python -m benchmarks.multicast --nodes 8 --planner auto --straggler 0.25 --peers ""
  python -m benchmarks.multicast --transport shm --nodes 5 --size 2GiB --planner chain --blocks 512
"""

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import multicast_ours, multicast_peers
from benchmarks.arguments import at_least, listed, parser_of, rate, say, share, size
from benchmarks.copies import CHECKED, COPIES
from benchmarks.crew import Crew, CrewError
from benchmarks.crew_messages import CastTask
from benchmarks.endings import keep_rows
from benchmarks.machine import describe_machine
from benchmarks.multicast_records import Setting, link_record, plot, records, show
from benchmarks.multicast_run import Contender, WrongBytes
from benchmarks.multicast_turns import logs_shown, take_turns
from benchmarks.owner import own_folder
from benchmarks.processes import Processes
from benchmarks.testbed import Testbed, TestbedError
from benchmarks.testbed_plan import LinkShape
from rdmacast.planners.automatic import choose_planner, comes_in_turn, usual_links
from rdmacast.planners.catalog import PLANNERS

AUTO = "auto"


def on_links(nodes: int, args: argparse.Namespace, common: dict[str, Any]) -> list[dict[str, Any]]:
    """All contenders with so many hosts. Raises TestbedError, CrewError, WrongBytes."""
    straggler = nodes // 2 if args.straggler_node is None else args.straggler_node
    slow = {straggler: args.straggler} if args.straggler < 1 else {}
    shape = LinkShape(rate_bytes_s=args.rate, shares=slow)
    with ExitStack() as stack:
        folder = stack.enter_context(own_folder(Path(tempfile.gettempdir())))
        testbed = stack.enter_context(Testbed(nodes, shape))
        stack.enter_context(logs_shown(folder))
        contenders = list(start_contenders(stack, testbed, nodes, args, folder))
        # A sequential cast takes a copy a target, and twice as long is still no failure.
        patience_s = 60.0 + 2 * nodes * args.size / (args.rate * args.straggler)
        turns = take_turns(
            contenders, args.size, args.repeat, patience_s, lambda: testbed.link_rate(0, 1, args.size)
        )
    limit_s = min(copy.seconds for copy in turns.copies)
    links = {"rate_bytes_s": args.rate, "mtu": shape.mtu, "burst_bytes": shape.burst_bytes, **common}
    setting = Setting(nodes=nodes, nbytes=args.size, limit_s=limit_s, slow=slow, common=links)
    return [link_record(turns.copies, setting), *records(turns, setting)]


def start_contenders(
    stack: ExitStack, testbed: Testbed, nodes: int, args: argparse.Namespace, folder: Path
) -> Iterator[Contender]:
    """Ours, then the peers that are to be had here."""
    say(f"{nodes} nodes: starting the processes")
    crew = stack.enter_context(multicast_ours.on_hosts(testbed, nodes, folder))
    yield from our_contenders(crew, nodes, args)
    for peer in args.peers:
        reason = multicast_peers.why_not(peer)
        if reason:
            say(f"SKIPPED {peer}: {reason}")
        elif peer == "gloo":
            yield stack.enter_context(multicast_peers.gloo(testbed, nodes, folder))
        elif peer == "nixl":
            yield stack.enter_context(multicast_peers.nixl(testbed, nodes, folder))
        else:
            for algorithm in args.mpi_algorithms:
                yield stack.enter_context(multicast_peers.mpi(testbed, nodes, folder, algorithm))


def our_contenders(crew: Crew, nodes: int, args: argparse.Namespace) -> Iterator[Contender]:
    for sources, planner in product(args.sources, args.planner):
        if sources >= nodes:
            continue
        if planner == AUTO:
            usual = usual_links("tcp")  # asking for a block, checking it and telling of it takes time, too
            facts = replace(
                usual,
                bytes_per_s=args.rate,
                latency_s=args.latency,
                restart_s=args.restart,
            )
            chosen = choose_planner(nodes=nodes, sources=sources, nbytes=args.size, facts=facts)
            task = task_of(args, chosen.planner, chosen.blocks, sources)
            yield Contender(AUTO, crew, nodes, task, reason=chosen.reason)
            continue
        for blocks in args.blocks if planner not in COPIES else (1,):
            yield Contender(planner, crew, nodes, task_of(args, planner, blocks, sources))


def task_of(args: argparse.Namespace, planner: str, blocks: int, sources: int) -> CastTask:
    in_turn = (
        not args.loose and args.transport == "tcp" and comes_in_turn(planner, args.size / blocks, args.rate)
    )
    return CastTask(
        planner=planner,
        blocks=blocks,
        sources=sources,
        window=args.window,
        in_turn=in_turn,
        link_bytes_s=int(args.rate) if args.transport == "tcp" else 0,
    )


def in_memory(nodes: int, args: argparse.Namespace, common: dict[str, Any]) -> list[dict[str, Any]]:
    """Nodes of one host, beside copies by as many processes. Raises CrewError, WrongBytes."""
    args = argparse.Namespace(**{**vars(args), "planner": [*args.planner, *COPIES], "sources": [1]})
    with ExitStack() as stack:
        folder = stack.enter_context(own_folder(Path(tempfile.gettempdir())))
        images = stack.enter_context(own_folder(Path("/dev/shm")))
        processes = stack.enter_context(Processes())
        stack.enter_context(logs_shown(folder))
        crew = stack.enter_context(multicast_ours.on_this_host(processes, nodes, folder, images))
        contenders = list(our_contenders(crew, nodes, args))
        turns = take_turns(contenders, args.size, args.repeat, 600.0, None)
    limit_s = min(
        statistics.median(run.seconds for run in runs)
        for one, runs in zip(contenders, turns.runs, strict=True)
        if one.name in CHECKED
    )
    return records(turns, Setting(nodes=nodes, nbytes=args.size, limit_s=limit_s, common=common))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of("benchmarks.multicast", __doc__)
    add = parser.add_argument
    planners = (*PLANNERS, AUTO)
    add("--nodes", type=listed(at_least(2)), default="8", help="with the sources, as in 2,4,8 (default 8)")
    add("--sources", type=listed(at_least(1)), default="1", help="of these; as in 1,2,4 (default 1)")
    add("--size", type=size, default="128MiB", help="of the image (default 128MiB)")
    add("--rate", type=rate, default="200mbit", help="of each link, each way (default 200mbit)")
    add(
        "--planner",
        type=listed(str, planners),
        default="binomial,chain,tree",
        help=f"of {', '.join(planners)} (default binomial,chain,tree)",
    )
    add("--blocks", type=listed(at_least(1)), default="128", help="of a cast; as in 64,128 (default 128)")
    add(
        "--loose",
        action="store_true",
        help="let pipelines of coarse blocks run ahead of their steps, as those of fine blocks do",
    )
    add("--window", type=at_least(1), default=3, help="blocks that a node pulls at once (default 3)")
    add("--latency", type=float, default=0.0005, help="for auto: seconds of a hop (default 0.0005)")
    add("--restart", type=float, default=0.001, help="for auto: seconds of a change of partner, a block")
    add("--straggler", type=share, default=1.0, help="share of the rate that one node's link has")
    add("--straggler-node", type=at_least(0), help="which node that is (default: the one in the middle)")
    add(
        "--peers",
        type=listed(str, multicast_peers.PEERS, least=0),
        default="gloo,mpi",
        help='of gloo, mpi, nixl (default gloo,mpi; "" for none); one that is missing is named and skipped',
    )
    add(
        "--mpi-algorithms",
        type=listed(str, least=0),
        default=",".join(multicast_peers.MPI_ALGORITHMS),
        help="of coll_tuned_bcast_algorithm (default %(default)s)",
    )
    add("--transport", choices=("tcp", "shm"), default="tcp", help="shm: on this host, without links")
    add("--repeat", type=at_least(1), default=5, help="turns (default 5)")
    add("--json", type=Path, help="write the records to this file")
    add("--plot", type=Path, help="write a PNG to this file")
    args = parser.parse_args(arguments)
    if not any(sources < nodes for sources in args.sources for nodes in args.nodes):
        parser.error("no number of nodes is above a number of sources: nobody would receive anything")
    return args


def measure(args: argparse.Namespace, into: list[dict[str, Any]]) -> None:
    """Each number of nodes; `into` has what is finished."""
    common = {
        "bytes": args.size,
        "transport": args.transport,
        "straggler": args.straggler,
        "repeat": args.repeat,
        **describe_machine("benchmarks.multicast"),
    }
    way = in_memory if args.transport == "shm" else on_links
    for nodes in args.nodes:
        rows = way(nodes, args, common)
        for row in rows:
            print(show(row), flush=True)
        into.extend(rows)


def main() -> None:
    args = parse()
    keep_rows(
        "multicast",
        lambda rows: measure(args, rows),
        (TestbedError, CrewError, WrongBytes, OSError),
        json=args.json,
        plot=args.plot,
        draw=plot,
    )


if __name__ == "__main__":
    main()
