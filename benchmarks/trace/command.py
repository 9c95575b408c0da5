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
five times the means of full provisioning, if that is among the modes or in the file --slo-from, else null.
TTFT counts from when a request is due; `ttft_by_start` is that of hot, live, warm and cold starts apart, and
`ttft_by_rate` by the requests due in the same second. `network` has the rates between nodes (of the model's
bytes) and of the gateway's link (prompts, tokens, commands), and the share of each link that is in use.
`decisions` are those of the scaling policy, `decision_ms` how old the newest request that one counted was
when it added instances because of that request, in time of the machine.
A run counts only with 0 failed requests, an exact ledger, a client less than 10 ms late (P99) and processors
less than 70 % busy until the last request, where time stolen by other guests is busy, and if no node read a
model from the store's folder at this machine's speed, which only modes with disks of their own shape
(`counts`, `runs`, `start_sources`); if one does not, the exit status is 1 after the records are written.

modes (`hypercast-pipeline` and `stop-the-world` not by default):
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.harness.arguments import (
    at_least,
    benchmark_parser,
    not_negative,
    positive,
    say,
    share,
    some_of,
)
from benchmarks.harness.crew import CrewError
from benchmarks.harness.owner import scratch_folder
from benchmarks.harness.records import Recording, describe_run, recording
from benchmarks.harness.traces import InvalidTrace
from benchmarks.scaleout.memory import MemoryNeed, free_memory
from benchmarks.scaleout.scenarios import add_emulated, parse_emulated
from benchmarks.testbed.hosted_platform import PlatformError, TestbedPlatform
from benchmarks.testbed.network import Testbed, TestbedError
from benchmarks.testbed.plan import LinkShape
from benchmarks.trace.arrivals import BURST, HALVES
from benchmarks.trace.five_means import FULL, add_five_means, read_five_means
from benchmarks.trace.modes import COMPARED, MODES, TraceMode
from benchmarks.trace.plot import plot
from benchmarks.trace.records import TraceRun, compare, record_of, run_of, show
from benchmarks.trace.run import run_trace
from benchmarks.trace.scenario import HOLDERS, SCALE_DOWN_HELP, TRACES, TraceScenario, params_of, scenario_of
from benchmarks.trace.synthetic import SYNTHETIC
from cli.errors import CliError
from invoker.emulated.device_clock import HOP_LATE_S, STEP_LATE_S
from registry.errors import RegistryError

_EXAMPLES = """
examples:
  sudo python -m benchmarks.trace --trace azure-conv --half first --speedup 4 --json t.json --plot t.png
  sudo python -m benchmarks.trace --trace azure-code --half second --start burst --nodes 12 --repeat 3
"""


class DoesNotCount(Exception):
    """The records are written, but what they say does not count."""


def measure(args: argparse.Namespace, out: Recording) -> None:
    """Run all modes in turns, `--repeat` times; `out` receives the records.

    Raises DoesNotCount after that, PlatformError, CrewError, CliError, TestbedError, OSError, ValueError.
    """
    scenario, facts = scenario_of(args)
    if excess := next(filter(None, (scenario.excess(MODES[name]) for name in args.modes)), ""):
        raise PlatformError(f"{excess}: use more --nodes or fewer --functions")
    need = memory_need(scenario, [MODES[name] for name in args.modes])
    if shortfall := need.shortfall(args.emulated, "append /1000, or use fewer --nodes", *free_memory()):
        raise PlatformError(shortfall)
    shape = LinkShape(rate_bytes_s=int(scenario.model_scale.link_bytes_s), bands=True)
    common = {**facts, **describe_run("benchmarks.trace")}
    earlier = None
    if args.slo_from is not None:
        params = params_of(args, scenario, MODES[FULL])
        earlier = read_five_means(args.slo_from, {**params, **common})
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
            answers = {name: [one for run in found for one in run.answers] for name, found in runs.items()}
            add_five_means(rows, answers, earlier)
            out.add(*rows)
            for line in compare(rows):
                print(line, flush=True)
    if uncounted := [row["name"] for row in rows if not row["counts"]]:
        raise DoesNotCount(f"runs of {', '.join(uncounted)} do not count")


def memory_need(scenario: TraceScenario, modes: Sequence[TraceMode]) -> MemoryNeed:
    """Return the most copies that hosts hold at once, with two on each accelerator and one in the store."""
    functions, nodes = len(scenario.bundles), scenario.nodes
    host_copies = nodes * max(min(functions, scenario.host_models(mode)) for mode in modes)
    copies = host_copies + 2 * nodes + functions
    return MemoryNeed(image_bytes=scenario.image_bytes, host_copies=host_copies, copies=copies)


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
        platform = stack.enter_context(
            TestbedPlatform(
                *(testbed, folder / "data", mode.planner),
                served_copies=mode.served_copies,
                moves_on_drain=mode.moves,
            )
        )
        result = run_trace(platform, mode, scenario)
    run = run_of(result, scenario.model_scale)
    attained = scenario.slo.attainment(run.answers)
    say(
        f"  GPU {run.gpu_s:.1f} s, SLO {attained:.3f}, busy {run.processor_share:.0%}, "
        f"saturated {run.saturated_share:.0%} of the seconds"
    )
    return run


def _start(text: str) -> float | str:
    return text if text == BURST else not_negative(text)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options."""
    modes = "\n".join(f"  {mode.name:23} {mode.description}" for mode in MODES.values())
    parser = benchmark_parser("benchmarks.trace", f"{__doc__}{modes}\n{_EXAMPLES}", plot=True)
    add = parser.add_argument
    named = ", ".join((*TRACES, *SYNTHETIC))
    add("--trace", default="azure-conv", help=f"{named}, or a CSV seconds,prompt_tokens,output_tokens")
    add(
        "--half", choices=HALVES, default="whole", help="the half of the trace: tune on one, report the other"
    )
    add("--start", type=_start, default=0.0, help="second of the half, or `burst` where it is burstiest")
    add("--minutes", type=positive, default=5.0, help="minutes of the trace")
    add("--sample", type=share, default=1.0, help="keep this share of its requests, chosen at random")
    add("--speedup", type=positive, default=4.0, help="play the trace this many times faster")
    add("--nodes", type=at_least(1), default=8, help="nodes")
    add_emulated(parser, slower=4)
    add("--functions", type=at_least(1), default=1, help="functions, each with its model, that share them")
    add(
        "--holders", choices=HOLDERS, default="gpu", help="where models are at first: serving, in host memory"
    )
    add("--host-models", type=at_least(1), help="models that fit into a host's memory (default 3 and 64 MiB)")
    add("--min-instances", type=at_least(0), help="of each function (default 1, with --holders host 0)")
    add("--modes", type=some_of(MODES), default=list(COMPARED), help=f"default {','.join(COMPARED)}")
    add("--policy", choices=("load", "concurrency"), default="load", help="scaling policy of all modes")
    add("--target-concurrency", type=at_least(1), default=32, help="calls per instance, for that policy")
    add("--ttft-target", type=positive, default=1.0, help="seconds to the first token")
    add("--tbt-target", type=positive, default=0.2, help="mean seconds between tokens")
    add("--slo-from", type=Path, metavar="FILE", help="take the means of fixed-full from this earlier record")
    add("--scale-down-delay", type=positive, metavar="S", help=SCALE_DOWN_HELP)
    add("--keep-alive", type=positive, default=2.0, help="seconds for which an idle last instance is kept")
    add("--host-ttl", type=positive, default=15.0, help="seconds for which an idle copy is in host memory")
    add("--tail", type=not_negative, default=10.0, help="seconds of the window after the last request")
    add("--late-ms", type=not_negative, default=1e3 * STEP_LATE_S, help="what a device forgives a step")
    add("--hop-late-ms", type=not_negative, default=1e3 * HOP_LATE_S, help="what it forgives a hop")
    add("--seed", type=int, default=0, help="of the functions' shares and synthetic traces")
    add("--repeat", type=at_least(1), default=1, help="turns")
    add("--keep-logs", type=Path, help="copy the platforms' logs to this folder")
    args = parse_emulated(parser, arguments)
    if args.min_instances is None:
        args.min_instances = 0 if args.holders == "host" else 1
    if args.holders == "host" and args.min_instances:
        parser.error("--holders host: models in host memory alone have no instances: use --min-instances 0")
    return args


def main() -> None:
    args = parse()
    errors = (DoesNotCount, TestbedError, PlatformError, CrewError, RegistryError, CliError, InvalidTrace)
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
