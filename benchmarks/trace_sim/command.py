"""Simulate elastic serving of a trace at up to thousands of nodes, with the platform's own scaling policy.

Nothing is measured but the policy's own time: arrivals, prompts, decode steps, starts and stops are events
in simulated time. Step times are those of the emulated profile, casts last as long as the platform's planners
predict; each start and each decision cost the platform's own time besides (--start-ms, --react-ms). A node
runs one instance; links are not shared between casts, and nodes do not serve while they load. With --hours
the trace is repeated for so many hours with the rates of a day, for each of --functions with a part of --rate
(Zipf); without, it is sent as by benchmarks.trace, of which the options have the same names and defaults.

Modes, all with the same policy and targets:
hypercast               casts by the planner that the platform chooses
serverlessllm           each node from its own disk, or host memory while it keeps a copy
serverlessllm-allcache  every host has the model in memory
faasnet, nccl           casts by a binary tree, by a ring after a group set-up, from running instances only;
                        without one, from the node's own disk
faasnet-copies, nccl-copies  the same casts, from copies in host memory too
blitzscale              casts by a chain, without ZigZag
fixed-full, fixed-half  instances on every node, on every second one; no scaling
ideal                   loading takes no time

One record per mode with the fields of benchmarks.trace where they apply; `is_simulated` is true, `wall_s` is
how long the simulation took, `decide_us` the policy's mean time. --against takes records of processes and
simulates their settings, but refuses those that do not count (client 10 ms late, processors 70 % busy,
failed requests) without --anyway; `gpu_s_ratio` is simulated over measured GPU time, `gpu_s_difference` their
difference by cause: instances loading, running steps, idle. `queued_s` is how long all requests waited for an
instance. `tbt` percentiles are of the requests' means.

examples:
  python -m benchmarks.trace_sim --trace azure-conv --half first --minutes 10 --nodes 8 --json s.json
  python -m benchmarks.trace_sim --hours 24 --nodes 1000 --functions 200 --rate 5 --min-instances 0 \\
      --keep-alive 60 --host-ttl 3600 --json day.json
  python -m benchmarks.trace_sim --against benchmarks/results/trace.json --json compared.json
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from benchmarks.harness.arguments import (
    at_least,
    benchmark_parser,
    not_negative,
    positive,
    share,
    some_of,
)
from benchmarks.harness.percentile import percentile
from benchmarks.harness.records import Record, all_but, describe_run, recording
from benchmarks.harness.traces import InvalidTrace, TraceRequest, trim_to_context
from benchmarks.scaleout.scenarios import add_emulated, parse_emulated
from benchmarks.trace.arrivals import BURST, HALVES, bounds, part_of, sample, spread
from benchmarks.trace.scenario import SCALE_DOWN_HELP, TRACES, scale_down_settings, trace_of
from benchmarks.trace.synthetic import SYNTHETIC
from benchmarks.trace_sim.against import compared, measured
from benchmarks.trace_sim.arrivals import DayTrace, each_function, zipf_weights
from benchmarks.trace_sim.modes import MODES
from benchmarks.trace_sim.simulation import SimulatedRun, SimulationSettings, simulate
from benchmarks.trace_sim.starts import Overheads
from registry.records.function import Scaling, ScalingMode


def run(args: argparse.Namespace, mode: str) -> Record:
    """Simulate one mode and return its record. Raises InvalidTrace, OSError, ValueError."""
    settings = settings_of(args, mode)
    arrivals, until_s = arrivals_of(args)
    done = simulate(settings, arrivals, until_s)
    return record_of(args, mode, done)


def settings_of(args: argparse.Namespace, mode: str) -> SimulationSettings:
    """Return the settings in model time: the platform's own times count for less on slowed-down devices."""
    overheads = Overheads(
        start_s=args.start_ms / 1e3 / args.slower,
        react_s=args.react_ms / 1e3 / args.slower,
        call_s=args.call_ms / 1e3 / args.slower,
        move_s=args.move_ms / 1e3 / args.slower,
    )
    known = MODES[mode]
    scaling = Scaling(
        min_instances=args.min_instances,
        policy=ScalingMode(args.policy),
        max_instances=args.max_instances,
        target_concurrency=args.target_concurrency,
        keep_alive_s=args.keep_alive,
        ttft_target_s=args.ttft_target,
        tbt_target_s=args.tbt_target,
        **scale_down_settings(args.scale_down_delay),
    )
    return SimulationSettings(
        profile=args.profile,
        mode=replace(known, moves=known.moves if args.drain_calls is None else args.drain_calls == "move"),
        scaling=scaling,
        nodes=args.nodes,
        overheads=overheads,
        host_images=args.host_images,
        host_ttl_s=args.host_ttl,
        keeps_gpu=args.keep_hot and not known.frees_images,
        kv_tokens=args.kv_tokens,
    )


def arrivals_of(args: argparse.Namespace) -> tuple[list[Iterator[TraceRequest]], float]:
    """Return the requests of each function, and the end of the run."""
    trace, context = trace_of(args), args.profile.model.context
    if args.hours:
        begin_s, end_s = bounds(trace, args.half)
        day = DayTrace.of(part_of(trace, args.half, 0.0, end_s - begin_s)[1], context)
        rate = args.rate or day.rate * args.speedup
        return [
            day.arrivals(function=number, rate=rate * weight, hours=args.hours, seed=args.seed)
            for number, weight in enumerate(zipf_weights(args.functions))
        ], args.hours * 3600
    _, part = part_of(trace, args.half, args.start, 60 * args.minutes)
    part = sample(part, args.sample, args.seed)
    timed = [replace(one, offset_s=one.offset_s / args.speedup) for one in part]
    requests = trim_to_context(spread(timed, args.functions, args.seed), context).arrivals
    own = each_function(requests, args.functions)
    return [iter(one) for one in own], requests[-1].offset_s + args.tail


def record_of(args: argparse.Namespace, mode: str, done: SimulatedRun) -> Record:
    """Return the record of a run."""
    figures = done.figures
    ttft = {f"ttft_p{share}_s": percentile(figures.ttft_s, share) for share in (50, 90, 99)}
    tbt = {f"tbt_p{share}_s": percentile(figures.tbt_s, share) for share in (50, 99)}
    nbytes = args.profile.image_bytes * args.profile.scale
    return {
        "name": mode,
        "is_simulated": True,
        "params": {
            **all_but(args, "profile", "mode", "against", "anyway"),
            "description": MODES[mode].description,
        },
        "requests": figures.requests,
        "failed": 0,
        "gpu_s": round(figures.gpu_s, 3),
        "gpu_loading_s": round(figures.loading_s, 3),
        "gpu_busy_s": round(figures.busy_s, 3),
        "gpu_idle_s": round(figures.gpu_s - figures.loading_s - figures.busy_s, 3),
        "queued_s": round(figures.queued_s, 3),
        "slo_attainment": round(figures.within / max(1, figures.requests), 6),
        **ttft,
        "ttft_mean_s": sum(figures.ttft_s) / max(1, len(figures.ttft_s)),
        **tbt,
        "host_byte_s": done.cluster.copy_s * nbytes,
        "cast_bytes": figures.cast_images * nbytes,
        "starts": dict(figures.starts),
        "max_instances": max(count for _, count in figures.instances),
        "instances": figures.timeline(),
        "decisions": figures.decisions,
        "decide_us": round(figures.deciding_s / max(1, figures.decisions) * 1e6, 1),
        "wall_s": round(done.wall_s, 2),
    }


def show(row: Record) -> str:
    """Format a record as one line."""
    line = (
        f"SIMULATED {row['name']:22} {row['requests']:8} requests, {row['gpu_s']:10.1f} GPU s, at most "
        f"{row['max_instances']} instances, {row['slo_attainment']:.2%} within targets, first token "
        f"P50 {row['ttft_p50_s'] or 0:.3f} P90 {row['ttft_p90_s'] or 0:.3f} "
        f"P99 {row['ttft_p99_s'] or 0:.3f} s, "
        f"took {row['wall_s']} s"
    )
    if "gpu_s_ratio" not in row:
        return line
    causes = ", ".join(f"{name} {change:+.1f}" for name, change in row["gpu_s_difference"].items())
    return (
        f"{line}\n  measured {row['measured_gpu_s']:.1f} GPU s: simulated / measured "
        f"{row['gpu_s_ratio']:.3f}; difference in GPU s: {causes}"
        f"\n  starts {row['starts']}, measured {row['measured_starts']}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    args = parse_emulated(parser, argv)
    with recording(
        "trace_sim", json=args.json, show=show, failures=(InvalidTrace, OSError, ValueError)
    ) as out:
        for row in rows(parser, args):
            if not out.records:
                row["run"] = describe_run("benchmarks.trace_sim")
            out.add(row)


def rows(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Iterator[Record]:
    """Yield the record of each mode, or of each measured one."""
    if not args.against:
        yield from (run(args, mode) for mode in args.mode)
        return
    for row in measured(args.against, anyway=args.anyway):
        one = parse_emulated(parser, list(chain.from_iterable(row.options)))
        yield compared(run(one, row.name), row)


def _start(text: str) -> float | str:
    return text if text == BURST else not_negative(text)


def make_parser() -> argparse.ArgumentParser:
    parser = benchmark_parser("benchmarks.trace_sim", __doc__)
    add = parser.add_argument
    add("--trace", default="azure-conv", help=f"{', '.join((*TRACES, *SYNTHETIC))}, or a CSV")
    add("--half", choices=HALVES, default="whole", help="the half of the trace, by time")
    add("--start", type=_start, default=0.0, help="second of the half, or `burst` where it is burstiest")
    add("--minutes", type=positive, default=5.0, help="minutes of the trace, without --hours")
    add("--speedup", type=positive, default=1.0, help="divide the times between requests by this")
    add("--sample", type=share, default=1.0, help="keep this share of the requests, without --hours")
    add("--hours", type=positive, help="repeat the trace for so many hours of a day")
    add("--functions", type=at_least(1), default=1, help="functions that share the requests")
    add("--rate", type=positive, help="mean requests a second of all functions (default the trace's)")
    add("--nodes", type=at_least(1), default=8, help="nodes with one instance each")
    add("--mode", type=some_of(MODES), default="hypercast", help="of these modes")
    add("--policy", choices=[mode.value for mode in ScalingMode], default="load", help="the scaling policy")
    add("--ttft-target", type=positive, default=1.0, metavar="S", help="target time to first token")
    add("--tbt-target", type=positive, default=0.2, metavar="S", help="target time between tokens")
    add("--scale-down-delay", type=positive, metavar="S", help=SCALE_DOWN_HELP)
    add("--keep-alive", type=not_negative, default=2.0, metavar="S", help="of idle instances")
    add("--target-concurrency", type=at_least(1), default=32, help="of the concurrency policy")
    add("--min-instances", type=at_least(0), default=1, help="of each function")
    add("--max-instances", type=at_least(1), help="of each function (default all nodes)")
    add("--tail", type=not_negative, default=10.0, metavar="S", help="GPU time after the last arrival")
    add("--kv-tokens", type=at_least(1), help="of an instance (default by the accelerator's memory)")
    add("--host-images", type=at_least(1), default=10, help="images that fit into a host's memory")
    add("--host-ttl", type=not_negative, default=15.0, metavar="S", help="how long hosts keep unused ones")
    hot = "whether accelerators keep images of ended instances, as nodes do by default"
    add("--keep-hot", action=argparse.BooleanOptionalAction, default=True, help=hot)
    add("--start-ms", type=not_negative, default=50.0, help="the platform's own time of a start")
    add("--react-ms", type=not_negative, default=50.0, help="from a change of the load to the decision")
    add("--call-ms", type=not_negative, default=5.0, help="the platform's own time of a first token")
    add(
        "--move-ms",
        type=not_negative,
        default=50.0,
        help="from one call that leaves a stopping instance to the next",
    )
    add(
        "--drain-calls",
        choices=("move", "finish"),
        help="what calls of a stopping instance do (default the mode's)",
    )
    add("--seed", type=int, default=0, help="equal seeds give equal figures")
    add("--against", type=Path, help="simulate the settings of these records of benchmarks.trace")
    add("--anyway", action="store_true", help="also of records that do not count")
    add_emulated(parser, slower=1)
    return parser


if __name__ == "__main__":
    main()
