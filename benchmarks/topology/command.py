"""Measure casts over leaf switches: ours, which has the leaf of each node, beside ours without.

Hosts are network namespaces (`benchmarks.testbed`; needs root and iproute2) under leaf switches. Links
between hosts and leaves have --rate each way; each leaf has one uplink to the spine, of --spine-rate each
way. Names and ranks say nothing of leaves: which host is under which leaf is drawn by --seed. All contenders
run in turns over the same links, and the bytes of every cast are verified. Each turn also times one plain
copy between two hosts: the fastest of these is `limit_s`.

Records:
hypercast        the planner that the platform chooses for these nodes, with their leaves
topology-blind   the one that it chooses without
blind-NAME       each other planner of --rivals, without leaves
median_s         from the start of the first process until the last target holds the image
spine_bytes      what all leaves sent to the spine in that time, headers included; spine_copies: in sizes of
                 the image; one copy must enter each leaf without a source
simulated_s      the time of the plan without a spine in its way

examples:
  sudo python -m benchmarks.topology --nodes 8 --leaves 2 --rate 400mbit --spine-rate 400mbit --json t.json
  sudo python -m benchmarks.topology --nodes 12 --leaves 3 --sources 2 --repeat 5
"""

import argparse
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness.arguments import at_least, benchmark_parser, rate, say, size, some_of
from benchmarks.harness.crew import Crew, CrewError
from benchmarks.harness.owner import scratch_folder
from benchmarks.harness.records import Record, Recording, chosen, describe_run, recording
from benchmarks.multicast import ours
from benchmarks.multicast.messages import MulticastTask
from benchmarks.multicast.records import RunSetting, record
from benchmarks.multicast.run import CastRun, DigestMismatch, MulticastContender
from benchmarks.multicast.turns import print_logs_on_error, take_turns
from benchmarks.testbed.network import Testbed, TestbedError
from benchmarks.testbed.plan import LinkShape, Spine
from rdmacast.plan.planners.automatic import choose_planner, default_link_facts, uses_slots
from rdmacast.plan.planners.catalog import PLANNERS
from rdmacast.plan.topology import NodeTopology

_WINDOW = 3  # blocks that a node pulls concurrently


def measure(args: argparse.Namespace, out: Recording) -> None:
    """Run all contenders in turns. Raises TestbedError, CrewError, DigestMismatch, ValueError."""
    leaf_of = draw_leaves(args.nodes, args.leaves, args.seed)
    with ExitStack() as stack:
        folder = stack.enter_context(scratch_folder(Path(tempfile.gettempdir())))
        spine = Spine(leaf_of=leaf_of, rate_bytes_s=args.spine_rate)
        testbed = stack.enter_context(Testbed(args.nodes, LinkShape(rate_bytes_s=args.rate), spine))
        stack.enter_context(print_logs_on_error(folder))
        say(f"{args.nodes} nodes under {args.leaves} leaf switches: starting processes")
        crew = stack.enter_context(ours.on_hosts(testbed, args.nodes, folder))
        patience_s = 60.0 + 2 * args.nodes * args.size / min(args.rate, args.spine_rate)
        turns = take_turns(
            list(contenders(crew, args, leaf_of)),
            args.size,
            args.repeat,
            patience_s,
            lambda: testbed.link_rate(0, 1, args.size),
            testbed.spine_bytes,
        )
    common = {
        "bytes": args.size,
        "leaf_of": list(leaf_of),
        **chosen(args, "leaves", "rate", "spine_rate", "repeat", "seed"),
        **describe_run("benchmarks.topology"),
    }
    setting = RunSetting(nodes=args.nodes, nbytes=args.size, limit_s=turns.fastest_copy_s, common=common)
    each = zip(turns.contenders, turns.runs, turns.counts, strict=True)
    out.add(*(_record(contender, runs, sent, setting) for contender, runs, sent in each))


def draw_leaves(nodes: int, leaves: int, seed: int) -> tuple[int, ...]:
    """Return the leaf of each host, equally many under each; host 0 is under leaf 0.

    Raises ValueError if there are fewer hosts than leaves.
    """
    if leaves > nodes:
        raise ValueError(f"{nodes} nodes cannot be under {leaves} leaf switches")
    others = [host % leaves for host in range(1, nodes)]
    random.Random(seed).shuffle(others)
    return (0, *others)


def contenders(crew: Crew, args: argparse.Namespace, leaf_of: Sequence[int]) -> Iterator[MulticastContender]:
    """Return ours with leaves and without, then the other planners without."""
    sites = tuple(NodeTopology(leaf=f"leaf-{leaf}") for leaf in leaf_of)
    facts = replace(default_link_facts("tcp"), bytes_per_s=args.rate)
    for name, known in (("hypercast", sites), ("topology-blind", ())):
        choice = choose_planner(
            nodes=args.nodes, sources=args.sources, nbytes=args.size, facts=facts, sites=known
        )
        leaves = [site.leaf for site in known]
        task = _task(args, choice.planner, choice.blocks, leaves)
        yield MulticastContender(name, crew, args.nodes, task, reason=choice.reason)
    for planner in args.rivals:
        yield MulticastContender(f"blind-{planner}", crew, args.nodes, _task(args, planner, args.blocks, []))


def _task(args: argparse.Namespace, planner: str, blocks: int, leaves: list[str]) -> MulticastTask:
    return MulticastTask(
        planner=planner,
        blocks=blocks,
        sources=args.sources,
        window=_WINDOW,
        in_slots=uses_slots(planner, args.size / blocks, args.rate),
        link_bytes_s=int(args.rate),
        leaves=leaves,
    )


def _record(
    contender: MulticastContender, runs: Sequence[CastRun], spine_bytes: Sequence[int], setting: RunSetting
) -> Record:
    row = record(contender, runs, setting)
    sent = int(statistics.median(spine_bytes))
    assert contender.task is not None
    row["params"]["planner"] = contender.task.planner
    return {**row, "spine_bytes": sent, "spine_copies": sent / setting.nbytes}


def show(row: dict[str, Any]) -> str:
    """Format a record as one line."""
    params = row["params"]
    return (
        f"{row['name']:18} {params['nodes']} nodes, {params['leaves']} leaves, {params['planner']} with "
        f"{params['blocks']} blocks: {row['median_s']:.3f} s, {row['ratio_to_limit']:.2f} x limit, "
        f"{row['spine_copies']:.2f} copies over the spine, CPU {row['processor_share']:.0%}"
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = benchmark_parser("benchmarks.topology", __doc__)
    add = parser.add_argument
    add("--nodes", type=at_least(2), default=8, help="nodes with the sources")
    add("--leaves", type=at_least(1), default=2, help="leaf switches")
    add("--sources", type=at_least(1), default=1, help="nodes that hold the image")
    add("--size", type=size, default="128MiB", help="image size")
    add("--rate", type=rate, default="400mbit", help="rate of each host's link, each way")
    add("--spine-rate", type=rate, default="400mbit", help="rate of each leaf's uplink, each way")
    add("--rivals", type=some_of(PLANNERS, least=0), default="binomial,tree", help="planners without leaves")
    add("--blocks", type=at_least(1), default=64, help="blocks of these rivals")
    add("--repeat", type=at_least(1), default=5, help="turns")
    add("--seed", type=int, default=0, help="of the hosts' leaves")
    args = parser.parse_args(arguments)
    if args.sources >= args.nodes:
        parser.error("--nodes must exceed --sources: no target would receive anything")
    if args.leaves > args.nodes:
        parser.error("--nodes must be at least --leaves: each leaf needs a host")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    failures = (TestbedError, CrewError, DigestMismatch, OSError, ValueError)
    with recording("topology", json=args.json, show=show, failures=failures) as out:
        measure(args, out)
