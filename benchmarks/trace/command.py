r"""Measure what ways of scaling out cost and how soon users get tokens, on a trace with bursts.

Everything is real except the accelerators, which are emulated (docs/OPERATIONS.md): gateway, scaling
policy, nodes, casts and sockets, each node on a host of its own behind a shaped link (`benchmarks.testbed`;
needs root and iproute2). Each mode gets a new platform with one instance, and then the same requests at the
same times, whether or not earlier ones are answered (open-loop). All modes have the same scaling policy and
targets. Times are model time: measured time divided by --slower, so that the platform's own overhead counts
for that much less than on real devices.

One record per mode: `gpu_s` is the allocated accelerator time from the ledger over the window, which ends
--tail after the last request is due in all modes (`answered_after_end` were not complete then), `host_byte_s`
the host memory of model copies over time, `cast_bytes` what nodes received from others, `slo_attainment` the
share of requests with both TTFT and mean time between tokens within the targets, `slo_5x_attainment` within
five times the means of full provisioning, if that is among the modes. TTFT counts from when a request is due.
A run counts only with 0 failed requests, an exact ledger, a client less than 10 ms late (P99) and processors
less than 70 % busy until the last request, where time stolen by other guests is busy (`counts`, `runs`).

modes (`hypercast-pipeline` and `stop-the-world` not by default):
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.harness.arguments import (
    at_least,
    benchmark_parser,
    not_negative,
    positive,
    say,
    some_of,
)
from benchmarks.harness.crew import CrewError
from benchmarks.harness.owner import scratch_folder
from benchmarks.harness.processes import ROOT
from benchmarks.harness.records import Recording, chosen, describe_run, recording
from benchmarks.harness.traces import InvalidTrace, TraceRequest, read_trace, trim_to_context
from benchmarks.scaleout.memory import MemoryNeed, free_memory
from benchmarks.scaleout.profiles import network_bytes_per_s
from benchmarks.scaleout.scenarios import add_emulated, emulated_device, emulated_model, parse_emulated
from benchmarks.testbed.hosted_platform import PlatformError, TestbedPlatform
from benchmarks.testbed.network import Testbed, TestbedError
from benchmarks.testbed.plan import LinkShape
from benchmarks.trace.arrivals import BURST, HALVES, burstiness, part_of, spread
from benchmarks.trace.measures import Slo
from benchmarks.trace.modes import COMPARED, MODES, TraceMode
from benchmarks.trace.plot import plot
from benchmarks.trace.records import TraceRun, compare, five_means_of, record_of, run_of, show
from benchmarks.trace.run import TraceScenario, run_trace
from benchmarks.trace.synthetic import SYNTHETIC, synthetic_trace
from cli.errors import CliError
from cli.upload.bundle import bundle_model
from invoker.emulated.device_clock import HOP_LATE_S, STEP_LATE_S, Lateness
from registry.errors import RegistryError

TRACES = {
    "azure-conv": ROOT / "benchmarks/data/azure-llm-2023-conv.csv.gz",
    "azure-code": ROOT / "benchmarks/data/azure-llm-2023-code.csv.gz",
}
_EXAMPLES = """
examples:
  sudo python -m benchmarks.trace --trace azure-conv --half first --speedup 4 --json t.json --plot t.png
  sudo python -m benchmarks.trace --trace azure-code --half second --start burst --nodes 12 --repeat 3
"""


def measure(args: argparse.Namespace, out: Recording) -> None:
    """Run all modes in turns, `--repeat` times; `out` receives the records.

    Raises PlatformError, CrewError, CliError, TestbedError, ValueError.
    """
    need = MemoryNeed(image_bytes=args.profile.image_bytes, host_copies=args.nodes, copies=2 * args.nodes)
    if shortfall := need.shortfall(args.emulated, "append /1000, or use fewer --nodes", *free_memory()):
        raise PlatformError(shortfall)
    scenario, facts = scenario_of(args)
    shape = LinkShape(rate_bytes_s=int(network_bytes_per_s(args.profile) / args.slower), bands=True)
    common = {**facts, **describe_run("benchmarks.trace")}
    runs: dict[str, list[TraceRun]] = {name: [] for name in args.modes}
    with scratch_folder(Path(tempfile.gettempdir())) as folder:
        try:
            with Testbed(args.nodes + 1, shape) as testbed:
                for turn in range(args.repeat):
                    for name in args.modes:
                        started_s = time.monotonic()
                        say(f"turn {turn + 1} of {args.repeat}: {name}")
                        runs[name].append(run_mode(testbed, MODES[name], scenario, folder, args.keep_logs))
                        say(f"  {name} took {time.monotonic() - started_s:.0f} s")
        finally:
            slo = scenario.slo
            rows = [
                record_of(name, found, slo, {**params_of(args, scenario, MODES[name]), **common})
                for name, found in runs.items()
                if found
            ]
            five_means_of(rows, runs)
            out.add(*rows)
            for line in compare(rows):
                print(line, flush=True)


def run_mode(
    testbed: Testbed, mode: TraceMode, scenario: TraceScenario, parent: Path, keep_logs: Path | None
) -> TraceRun:
    """Run one mode once, on a new platform. Raises PlatformError, CrewError, CliError."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=parent)))
        if keep_logs is not None:
            stack.callback(
                shutil.copytree, folder / "data" / "logs", keep_logs / mode.name, dirs_exist_ok=True
            )
        platform = stack.enter_context(TestbedPlatform(testbed, folder / "data", mode.planner))
        result = run_trace(platform, mode, scenario)
    run = run_of(result, scenario.slower, scenario.device.scale)
    attained = scenario.slo.attainment(run.answers)
    say(f"  GPU {run.gpu_s:.1f} s, SLO {attained:.3f}, busy {run.processor_share:.0%}")
    return run


def scenario_of(args: argparse.Namespace) -> tuple[TraceScenario, dict[str, Any]]:
    """Return the scenario, and facts about its part of the trace. Raises ValueError, OSError."""
    trace = trace_of(args)
    from_s, part = part_of(trace, args.half, args.start, 60 * args.minutes)
    timed = [TraceRequest(one.offset_s / args.speedup, one.prompt_tokens, one.output_tokens) for one in part]
    trimmed = trim_to_context(spread(timed, args.functions, args.seed), args.profile.model.context)
    facts = {
        "from_s": round(from_s, 3),
        "burstiness": round(burstiness([one.offset_s for one in part], 60 * args.minutes), 4),
        "requests": len(part),
        "prompts_capped": trimmed.prompts_capped,
        "outputs_capped": trimmed.outputs_capped,
    }
    scenario = TraceScenario(
        device=emulated_device(args),
        profile=args.profile,
        lateness=Lateness(step_s=args.late_ms / 1e3, hop_s=args.hop_late_ms / 1e3),
        bundle=bundle_model(emulated_model(args), "auto", "", None),
        nodes=args.nodes,
        arrivals=trimmed.arrivals,
        functions=[f"model-{place}" for place in range(args.functions)],
        policy=args.policy,
        target_concurrency=args.target_concurrency,
        slo=Slo(ttft_s=args.ttft_target, tbt_s=args.tbt_target),
        scale_down_s=args.scale_down_delay,
        host_ttl_s=args.host_ttl,
        tail_s=args.tail,
    )
    return scenario, facts


def trace_of(args: argparse.Namespace) -> list[TraceRequest]:
    """Return the whole trace. Raises InvalidTrace, OSError."""
    if args.trace == SYNTHETIC:
        return synthetic_trace(args.seed)
    return read_trace(TRACES.get(args.trace, Path(args.trace)))


def params_of(args: argparse.Namespace, scenario: TraceScenario, mode: TraceMode) -> dict[str, Any]:
    """Return the parameters of a mode's record."""
    links = asdict(args.profile.links)
    names = ("trace", "half", "start", "minutes", "speedup", "nodes", "slower", "functions", "seed", "repeat")
    return {
        "emulated": str(args.profile),
        "model": scenario.bundle.architecture,
        "image_bytes": scenario.bundle.image_bytes * scenario.device.scale,
        **chosen(args, *names, "policy", "target_concurrency", "scale_down_delay", "host_ttl", "tail"),
        "slo": asdict(scenario.slo),
        "late_s": asdict(scenario.lateness),
        "ssd_bytes_s": links["disk"],
        "host_to_gpu_bytes_s": links["host"],
        "link_bytes_s": links["network"],
        "says": mode.description,
        **{name: getattr(mode, name) for name in ("planner", "setup_s", "live", "share")},
    }


def _start(text: str) -> float | str:
    return text if text == BURST else not_negative(text)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options."""
    modes = "\n".join(f"  {mode.name:23} {mode.description}" for mode in MODES.values())
    parser = benchmark_parser("benchmarks.trace", f"{__doc__}{modes}\n{_EXAMPLES}", plot=True)
    add = parser.add_argument
    named = ", ".join((*TRACES, SYNTHETIC))
    add("--trace", default="azure-conv", help=f"{named}, or a CSV seconds,prompt_tokens,output_tokens")
    add(
        "--half", choices=HALVES, default="whole", help="the half of the trace: tune on one, report the other"
    )
    add("--start", type=_start, default=0.0, help="second of the half, or `burst` where it is burstiest")
    add("--minutes", type=positive, default=5.0, help="minutes of the trace")
    add("--speedup", type=positive, default=4.0, help="play the trace this many times faster")
    add("--nodes", type=at_least(1), default=8, help="nodes")
    add_emulated(parser, slower=4)
    add("--functions", type=at_least(1), default=1, help="functions that share the requests")
    add("--modes", type=some_of(MODES), default=list(COMPARED), help=f"default {','.join(COMPARED)}")
    add("--policy", choices=("load", "concurrency"), default="load", help="scaling policy of all modes")
    add("--target-concurrency", type=at_least(1), default=32, help="calls per instance, for that policy")
    add("--ttft-target", type=positive, default=1.0, help="seconds to the first token")
    add("--tbt-target", type=positive, default=0.2, help="mean seconds between tokens")
    add("--scale-down-delay", type=positive, default=2.0, help="seconds for which a surplus is kept")
    add("--host-ttl", type=positive, default=15.0, help="seconds for which an idle copy is in host memory")
    add("--tail", type=not_negative, default=10.0, help="seconds of the window after the last request")
    add("--late-ms", type=not_negative, default=1e3 * STEP_LATE_S, help="what a device forgives a step")
    add("--hop-late-ms", type=not_negative, default=1e3 * HOP_LATE_S, help="what it forgives a hop")
    add("--seed", type=int, default=0, help="of the functions' shares and synthetic traces")
    add("--repeat", type=at_least(1), default=1, help="turns")
    add("--keep-logs", type=Path, help="copy the platforms' logs to this folder")
    return parse_emulated(parser, arguments)


def main() -> None:
    args = parse()
    errors = (TestbedError, PlatformError, CrewError, RegistryError, CliError, InvalidTrace)
    with recording(
        "trace",
        json=args.json,
        show=show,
        plot=args.plot,
        draw=plot,
        failures=(*errors, OSError, ValueError),
    ) as out:
        measure(args, out)


if __name__ == "__main__":
    main()
