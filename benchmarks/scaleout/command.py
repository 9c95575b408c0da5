r"""Measure how soon nodes serve a model that few of them hold, with different ways of moving it.

Everything is real except the accelerators, which are emulated (docs/OPERATIONS.md): gateway, control loop,
nodes, image, casts and sockets, each node on a host of its own behind a shaped link (`benchmarks.testbed`;
needs root and iproute2). In each turn every mode gets a new platform with k holders of the model, and then
all requests at once. Times are model time: measured time divided by --slower, so that the platform's own
overhead counts for that much less than on real devices. With --real nodes compute on the processor, a random
float32 Llama of that many layers, and nothing is scaled. A whole model needs its size in memory and shared
memory per holder: append /1000 to scale sizes and rates down alike.

One record per mode, source count and kind of holders, with each request's time to first token in `seconds`;
`limit_s` is a whole copy over one link and one prefill, `tokens_per_s` is every `step_s`, `first_live_s` the
first token of nodes still loading the model, `transfer_s` a copy over one link:
hypercast             serves while loading; the gateway chooses the planner
stop-the-world        a binomial pipeline; nodes serve once they hold the whole model
faasnet               a binary tree, likewise
nccl                  a group set-up of 300 ms, then a ring, likewise
gloo                  the duration of gloo's broadcast on these links, then all serve
serverlessllm-ssd     no cast: each node loads from its own disk at 5 GB/s, also holders in host memory
serverlessllm-memory  no cast: nodes load from their own host memory
blitzscale            a chain, and ZigZag of overloaded and loading nodes
serverlessllm-mixed (not by default): holders from host memory, others from their own disks
turned, half-turned, unturned (not by default): hypercast with k-way reordering on, by halves, off

examples:
  sudo python -m benchmarks.scaleout --holders host,gpu --sources 1,2,4 --json s.json --plot s.png
  sudo python -m benchmarks.scaleout --holders mixed --sources 2,4 --modes hypercast,stop-the-world
  sudo python -m benchmarks.scaleout --sources 8 --modes hypercast,serverlessllm-memory
  sudo python -m benchmarks.scaleout --holders gpu --sources 4 --modes turned,half-turned,unturned
  sudo python -m benchmarks.scaleout --real 5 --nodes 6 --sources 2 --requests 40 --prompt-tokens 24 \
      --output-tokens 32 --modes hypercast,stop-the-world
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

from benchmarks.harness.arguments import at_least, benchmark_parser, comma_list, rate, say, some_of
from benchmarks.harness.crew import CrewError
from benchmarks.harness.owner import scratch_folder
from benchmarks.harness.random_llama import LAYER_BYTES
from benchmarks.harness.records import Recording, chosen, describe_run, recording
from benchmarks.multicast.peers import gloo
from benchmarks.multicast.run import CastImage, DigestMismatch
from benchmarks.scaleout.cluster import BurstResult, BurstScenario, send_burst
from benchmarks.scaleout.memory import MemoryNeed, free_memory
from benchmarks.scaleout.modes import COMPARED, EMULATED_ONLY, MODES, Mode
from benchmarks.scaleout.plot import plot
from benchmarks.scaleout.predicted import stairs
from benchmarks.scaleout.records import BurstRun, arrivals, compare, record_of, requests_of, show
from benchmarks.scaleout.scenarios import (
    TIMEOUT_S,
    add_emulated,
    has_targets,
    link_bytes_s,
    parse_emulated,
    scenarios,
    transfer_s,
)
from benchmarks.testbed.hosted_platform import PlatformError, TestbedPlatform
from benchmarks.testbed.network import Testbed, TestbedError
from benchmarks.testbed.plan import LinkShape
from cli.errors import CliError
from invoker.emulated.profiles import StepLoad
from registry.errors import RegistryError

_SEED = 1
HOLDERS = ("gpu", "host", "mixed")


def measure(args: argparse.Namespace, out: Recording) -> None:
    """Run each scenario with all modes in turns; `out` receives finished records.

    Raises what `take_turns` does, and PlatformError if the images do not fit into memory.
    """
    if shortfall := memory_shortfall(args, *free_memory()):
        raise PlatformError(shortfall)
    common = describe_run("benchmarks.scaleout")
    shape = LinkShape(rate_bytes_s=int(link_bytes_s(args) / args.slower), bands=True)
    with scratch_folder(Path(tempfile.gettempdir())) as folder:
        made = scenarios(args, folder)
        for number, scenario in enumerate(made, 1):
            say(f"scene {number} of {len(made)}: k = {scenario.sources} in {scenario.holders} memory")
            runs: dict[str, list[BurstRun]] = {name: [] for name in args.modes}
            rows = []
            try:
                with Testbed(args.nodes + 1, shape) as testbed:
                    take_turns(testbed, scenario, args, folder, runs)
            finally:
                for name in (name for name in args.modes if runs[name]):
                    params = {**params_of(args, scenario, MODES[name]), **common}
                    rows.append(record_of(name, runs[name], limits_of(args, scenario), params))
                out.add(*rows)
                for line in compare(rows):
                    print(line, flush=True)


def memory_shortfall(args: argparse.Namespace, free_shared_bytes: int, available_bytes: int) -> str:
    """Return why the images do not fit into this machine's memory, with the remedy, or ""."""
    modes = [MODES[name] for name in args.modes]
    if args.real:
        image_bytes, what = args.real * LAYER_BYTES, f"--real {args.real}"
        advice = "use fewer layers, --nodes or --sources"
    else:
        base = args.emulated.partition("/")[0]
        image_bytes, what = args.profile.image_bytes, f"--emulated {args.emulated}"
        advice = f"use --emulated {base}/1000, which scales sizes and rates alike, or fewer --nodes"
    need = MemoryNeed.of(image_bytes, args.nodes, args.sources, modes)
    return need.shortfall(what, advice, free_shared_bytes, available_bytes)


def take_turns(
    testbed: Testbed,
    scenario: BurstScenario,
    args: argparse.Namespace,
    folder: Path,
    runs: dict[str, list[BurstRun]],
) -> None:
    """Run all modes in turns, `--repeat` times. Raises what run_mode does, and ValueError."""
    for turn in range(args.repeat):
        for name in args.modes:
            started_s = time.monotonic()
            say(f"turn {turn + 1} of {args.repeat}: {name}")
            result = run_mode(testbed, MODES[name], scenario, folder, args.keep_logs)
            runs[name].append(run_of(args, scenario, result))
            say(f"  {name} took {time.monotonic() - started_s:.0f} s")


def run_mode(
    testbed: Testbed, mode: Mode, scenario: BurstScenario, parent: Path, keep_logs: Path | None
) -> BurstResult:
    """Run one burst on a new platform. Raises PlatformError, CrewError."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=parent)))
        wait_s = wait_of(testbed, mode, scenario, folder)
        if keep_logs is not None:
            kept = keep_logs / f"{mode.name}-{scenario.holders}-{scenario.sources}"
            stack.callback(shutil.copytree, folder / "data" / "logs", kept, dirs_exist_ok=True)
        platform = stack.enter_context(TestbedPlatform(testbed, folder / "data", mode.planner))
        return send_burst(platform, mode, scenario, wait_s)


def run_of(args: argparse.Namespace, scenario: BurstScenario, result: BurstResult) -> BurstRun:
    """Convert a result to model time. Raises ValueError for a failed request."""
    requests = requests_of(result.answers, args.slower)
    if args.real:
        return BurstRun(requests=requests, seen=result.seen)
    found = stairs(args.profile, scenario.burst, result.seen, arrivals(requests))
    return BurstRun(requests=requests, seen=result.seen, stairs=found)


def wait_of(testbed: Testbed, mode: Mode, scenario: BurstScenario, folder: Path) -> float:
    """Return how long nodes without the model wait before its first byte. Raises CrewError."""
    targets = scenario.nodes - scenario.sources
    if not mode.gloo or not targets:
        return mode.setup_s * scenario.slower
    with gloo(testbed, targets + 1, folder) as ranks:  # from one host to `targets` others, all connected
        took_s = ranks.run(CastImage.make(scenario.bundle.image_bytes, _SEED), "", TIMEOUT_S).seconds
    say(f"  gloo's broadcast to {targets} took {took_s:.2f} s")
    return max(0.0, took_s - scenario.own_copy_s)


def limits_of(args: argparse.Namespace, scenario: BurstScenario) -> dict[str, float]:
    """Return the time of a copy over one link, and with one prefill where a profile has it."""
    moved_s = transfer_s(args, scenario.bundle)
    prefill_s = 0.0 if args.real else args.profile.step_s(StepLoad(tokens=args.prompt_tokens, sequences=1))
    return {"transfer_s": moved_s, "limit_s": moved_s + prefill_s}


def params_of(args: argparse.Namespace, scenario: BurstScenario, mode: Mode) -> dict[str, Any]:
    links = {} if args.real else asdict(args.profile.links)
    return {
        "emulated": "" if args.real else str(args.profile),
        "model": scenario.bundle.architecture,
        "image_bytes": scenario.bundle.image_bytes,
        "nodes": scenario.nodes,
        "sources": scenario.sources,
        "holders": scenario.holders,
        **chosen(args, "slower", "requests", "prompt_tokens", "output_tokens", "repeat"),
        "ssd_bytes_s": links.get("disk"),
        "host_to_gpu_bytes_s": links.get("host"),
        "link_bytes_s": links.get("network", args.rate),
        "says": mode.description,
        "planner": mode.planner,
        "setup_s": mode.setup_s,
        "live": mode.live,
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = benchmark_parser("benchmarks.scaleout", __doc__, plot=True)
    add = parser.add_argument
    add_emulated(parser, slower=10)
    layers = "compute on the processor with this many layers of about 51 MB"
    add("--real", type=at_least(2), metavar="LAYERS", help=layers)
    add("--rate", type=rate, default="200mbit", help="rate of each link, with --real")
    add("--nodes", type=at_least(2), default=8, help="nodes with the sources")
    add("--sources", type=comma_list(at_least(1)), default="1", help="nodes that hold it, such as 1,2,4")
    where = "of gpu,host,mixed (the first half serve), where sources hold it"
    add("--holders", type=some_of(HOLDERS), default="host", help=where)
    add("--requests", type=at_least(1), default=50, help="requests in the burst")
    add("--prompt-tokens", type=at_least(1), default=512, help="tokens per prompt")
    add("--output-tokens", type=at_least(2), default=128, help="tokens per output")
    add("--modes", type=some_of(MODES), help=f"default {','.join(COMPARED)}")
    add("--repeat", type=at_least(1), default=1, help="turns")
    add("--keep-logs", type=Path, help="copy the platforms' logs to this folder")
    args = parse_emulated(parser, arguments)
    if args.real:
        args.slower = 1
    args.modes = args.modes or [name for name in COMPARED if not (args.real and name in EMULATED_ONLY)]
    if args.real and any(name in EMULATED_ONLY for name in args.modes):
        parser.error(f"--real cannot run {', '.join(EMULATED_ONLY)}: they need emulated devices")
    if not any(has_targets(args.nodes, k, holders) for k in args.sources for holders in args.holders):
        parser.error("--sources must be below --nodes at least once: no node would load anything")
    return args


def main() -> None:
    args = parse()
    errors = (TestbedError, PlatformError, CrewError, DigestMismatch, RegistryError, CliError)
    with recording(
        "scaleout",
        json=args.json,
        show=show,
        plot=args.plot,
        draw=plot,
        failures=(*errors, OSError, ValueError),
    ) as out:
        measure(args, out)


if __name__ == "__main__":
    main()
