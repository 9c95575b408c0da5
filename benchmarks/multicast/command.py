"""Measure casts of a model to many nodes: ours with any planner, gloo and Open MPI, over shaped links.

For each number of nodes this makes as many hosts on this machine (network namespaces with links shaped both
ways: `benchmarks.testbed`; needs root and iproute2), starts all contenders there and runs them in turns.
The bytes of every cast are verified. Each turn also times one plain copy between two hosts: the fastest of
these is `limit_s`, what a link needs for the size.

One record per planner, block count, node count and source count, and per peer (`gloo`, `mpi`, `nixl`; one
source):
median_s         from the start of the first process until the last target holds the image
first_block_s    until the first target holds its first block; first_block_of_last_s: until all have one
                 (ours only; `round_trip_s` of the record `link` is that of one byte)
first_full_s     until the first target does; skew_s is the time between the two
first_pipeline_s until one target of each sub-group holds the chunk with which its sub-group starts: these
                 targets can then serve together (ours only)
simulated_s      the time of the plan in rdmacast/simulate/plans.py at the measured rate (ours only)
bytes_per_cpu_s  bytes received by targets per CPU second of the whole machine; bytes_per_own_cpu_s counts
                 only the contender's processes, which excludes other work and kernel work in interrupts
processor_share  of the machine's processors; near 1 the processor was measured, not the links

`mpi` is the fastest of --mpi-algorithms. With --transport shm there are no links: nodes on this host read
each other's memory, beside plain copies by as many processes (`copy`) and copies that verify each unit while
it is in the cache (`copy-checked` from a mapping, `read-checked` by reads of the file; the lower of their
medians is `limit_s`).

examples:
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

from benchmarks.harness.arguments import (
    at_least,
    benchmark_parser,
    comma_list,
    rate,
    say,
    share,
    size,
    some_of,
)
from benchmarks.harness.crew import Crew, CrewError
from benchmarks.harness.owner import scratch_folder
from benchmarks.harness.processes import Processes
from benchmarks.harness.records import Recording, chosen, describe_run, recording
from benchmarks.multicast import ours as multicast_ours
from benchmarks.multicast import peers as multicast_peers
from benchmarks.multicast.copies import CHECKED, COPIES
from benchmarks.multicast.messages import MulticastTask
from benchmarks.multicast.records import RunSetting, link_record, plot, records, show
from benchmarks.multicast.run import DigestMismatch, MulticastContender
from benchmarks.multicast.turns import print_logs_on_error, take_turns
from benchmarks.testbed.network import Testbed, TestbedError
from benchmarks.testbed.plan import LinkShape
from rdmacast.plan.planners.automatic import choose_planner, default_link_facts, uses_slots
from rdmacast.plan.planners.catalog import PLANNERS

AUTO = "auto"
KEPT, FRESH, APART = "kept", "fresh", "apart"
_TRIPS = 5


def on_links(nodes: int, args: argparse.Namespace, common: dict[str, Any]) -> list[dict[str, Any]]:
    """Run all contenders on `nodes` hosts. Raises TestbedError, CrewError, DigestMismatch."""
    straggler = nodes // 2 if args.straggler_node is None else args.straggler_node
    slow = {straggler: args.straggler} if args.straggler < 1 else {}
    shape = LinkShape(rate_bytes_s=args.rate, shares=slow)
    with ExitStack() as stack:
        folder = stack.enter_context(scratch_folder(Path(tempfile.gettempdir())))
        testbed = stack.enter_context(Testbed(nodes, shape))
        round_trip_s = min(testbed.link_rate(0, 1, 1).seconds for _ in range(_TRIPS))
        stack.enter_context(print_logs_on_error(folder))
        contenders = list(start_contenders(stack, testbed, nodes, args, folder))
        # A sequential cast takes one copy per target; allow twice that.
        patience_s = 60.0 + 2 * nodes * args.size / (args.rate * args.straggler)
        turns = take_turns(
            contenders, args.size, args.repeat, patience_s, lambda: testbed.link_rate(0, 1, args.size)
        )
    limit_s = turns.fastest_copy_s
    links = {"rate_bytes_s": args.rate, "mtu": shape.mtu, "burst_bytes": shape.burst_bytes, **common}
    setting = RunSetting(nodes=nodes, nbytes=args.size, limit_s=limit_s, slow=slow, common=links)
    return [link_record(turns.copies, setting, round_trip_s), *records(turns, setting)]


def start_contenders(
    stack: ExitStack, testbed: Testbed, nodes: int, args: argparse.Namespace, folder: Path
) -> Iterator[MulticastContender]:
    """Start ours, then the peers that are installed."""
    say(f"{nodes} nodes: starting processes")
    crew = stack.enter_context(multicast_ours.on_hosts(testbed, nodes, folder))
    yield from hypercast_contenders(crew, nodes, args)
    for peer in args.peers:
        reason = multicast_peers.unavailable_reason(peer)
        if reason:
            say(f"SKIPPED {peer}: {reason}")
        elif peer == "gloo":
            yield stack.enter_context(multicast_peers.gloo(testbed, nodes, folder))
        elif peer == "nixl":
            yield stack.enter_context(multicast_peers.nixl(testbed, nodes, folder))
        else:
            for algorithm in args.mpi_algorithms:
                yield stack.enter_context(multicast_peers.mpi(testbed, nodes, folder, algorithm))


def hypercast_contenders(crew: Crew, nodes: int, args: argparse.Namespace) -> Iterator[MulticastContender]:
    for sources, planner, links in product(args.sources, args.planner, args.links):
        if sources >= nodes:
            continue
        suffix = "" if links == KEPT else f"-{links}"
        if planner == AUTO:
            # With the cost of request, check and announcement of a block.
            usual = default_link_facts("tcp")
            facts = replace(usual, bytes_per_s=args.rate, latency_s=args.latency, restart_s=args.restart)
            chosen = choose_planner(nodes=nodes, sources=sources, nbytes=args.size, facts=facts)
            task = task_of(args, chosen.planner, chosen.blocks, sources, links)
            yield MulticastContender(AUTO + suffix, crew, nodes, task, reason=chosen.reason)
            continue
        for blocks in args.blocks:
            task = task_of(args, planner, blocks, sources, links)
            yield MulticastContender(planner + suffix, crew, nodes, task)


def copy_contenders(crew: Crew, nodes: int, args: argparse.Namespace) -> Iterator[MulticastContender]:
    """Yield plain copies, which have no planner, blocks or links to choose."""
    for name in COPIES:
        yield MulticastContender(name, crew, nodes, task_of(args, name, blocks=1, sources=1, links=KEPT))


def task_of(args: argparse.Namespace, planner: str, blocks: int, sources: int, links: str) -> MulticastTask:
    in_slots = (
        not args.loose and args.transport == "tcp" and uses_slots(planner, args.size / blocks, args.rate)
    )
    return MulticastTask(
        planner=planner,
        blocks=blocks,
        sources=sources,
        window=args.window,
        in_slots=in_slots,
        link_bytes_s=int(args.rate) if args.transport == "tcp" else 0,
        fresh_links=links == FRESH,
        apart=links == APART,
    )


def in_memory(nodes: int, args: argparse.Namespace, common: dict[str, Any]) -> list[dict[str, Any]]:
    """Run nodes of one host, beside copies by as many processes. Raises CrewError, DigestMismatch."""
    args = argparse.Namespace(**{**vars(args), "sources": [1]})
    with ExitStack() as stack:
        folder = stack.enter_context(scratch_folder(Path(tempfile.gettempdir())))
        images = stack.enter_context(scratch_folder(Path("/dev/shm")))
        processes = stack.enter_context(Processes())
        stack.enter_context(print_logs_on_error(folder))
        crew = stack.enter_context(multicast_ours.on_this_host(processes, nodes, folder, images))
        contenders = [*hypercast_contenders(crew, nodes, args), *copy_contenders(crew, nodes, args)]
        turns = take_turns(contenders, args.size, args.repeat, 600.0, None)
    limit_s = min(
        statistics.median(run.seconds for run in runs)
        for one, runs in zip(contenders, turns.runs, strict=True)
        if one.name in CHECKED
    )
    return records(turns, RunSetting(nodes=nodes, nbytes=args.size, limit_s=limit_s, common=common))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = benchmark_parser("benchmarks.multicast", __doc__, plot=True)
    add_size_options(parser)
    add_cast_options(parser)
    add_peer_options(parser)
    add = parser.add_argument
    add("--transport", choices=("tcp", "shm"), default="tcp", help="shm: on this host, without links")
    add("--repeat", type=at_least(1), default=5, help="turns")
    args = parser.parse_args(arguments)
    if not any(sources < nodes for sources in args.sources for nodes in args.nodes):
        parser.error("--nodes must exceed --sources at least once: no target would receive anything")
    return args


def add_size_options(parser: argparse.ArgumentParser) -> None:
    """Add the numbers of nodes, and the sizes and rates."""
    add = parser.add_argument
    add("--nodes", type=comma_list(at_least(2)), default="8", help="nodes with the sources, such as 2,4,8")
    add("--sources", type=comma_list(at_least(1)), default="1", help="sources, such as 1,2,4")
    add("--size", type=size, default="128MiB", help="image size")
    add("--rate", type=rate, default="200mbit", help="rate of each link, each way")
    add("--straggler", type=share, default=1.0, help="fraction of the rate of one node's link")
    add("--straggler-node", type=at_least(0), help="the straggler's number (default: the middle node)")


def add_cast_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of our casts."""
    add, planners = parser.add_argument, (*PLANNERS, AUTO)
    add("--planner", type=some_of(planners), default="binomial,chain,tree", help=f"of {', '.join(planners)}")
    add("--blocks", type=comma_list(at_least(1)), default="128", help="blocks per cast, such as 64,128")
    add("--loose", action="store_true", help="let pipelines of coarse blocks run ahead of their steps")
    links = some_of((KEPT, FRESH, APART))
    add(
        "--links",
        type=links,
        default=KEPT,
        help="kept: open between casts; fresh: opened by each cast; apart: kept, and the sources and the "
        "first target have a processor of their own",
    )
    add("--window", type=at_least(1), default=3, help="blocks that a node pulls concurrently")
    add("--latency", type=float, default=0.0005, help="for auto: seconds per hop")
    add("--restart", type=float, default=0.001, help="for auto: seconds per change of partner, per block")


def add_peer_options(parser: argparse.ArgumentParser) -> None:
    """Add the peers and their options."""
    add = parser.add_argument
    peers = some_of(multicast_peers.PEERS, least=0)
    add(
        "--peers", type=peers, default="gloo,mpi", help="of gloo,mpi,nixl, or empty; missing ones are skipped"
    )
    algorithms = ",".join(multicast_peers.MPI_ALGORITHMS)
    add("--mpi-algorithms", type=comma_list(str, least=0), default=algorithms, help="of Open MPI")


def measure(args: argparse.Namespace, out: Recording) -> None:
    """Measure each number of nodes; `out` receives finished records."""
    common = {
        "bytes": args.size,
        **chosen(args, "transport", "straggler", "repeat"),
        **describe_run("benchmarks.multicast"),
    }
    run = in_memory if args.transport == "shm" else on_links
    for nodes in args.nodes:
        out.add(*run(nodes, args, common))


def main() -> None:
    args = parse()
    failures = (TestbedError, CrewError, DigestMismatch, OSError)
    with recording(
        "multicast", json=args.json, show=show, plot=args.plot, draw=plot, failures=failures
    ) as out:
        measure(args, out)


if __name__ == "__main__":
    main()
