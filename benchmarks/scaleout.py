"""A burst on a model that few nodes hold: how soon the others serve, by different ways of moving it.

Everything is real but the accelerators, which are emulated (docs/OPERATIONS.md): gateway, control loop,
nodes, image, casts and sockets, each node on a host of its own behind a shaped link (benchmarks/testbed.py;
needs root and iproute2). In each turn every mode gets a fresh platform with k holders of the model, and then
all requests at once. Times are the model's: what was measured, divided by how many times slower the devices
and links are, so that overhead of the platform itself counts for as many times less than it would. With
`--real` nodes compute on the processor, a random float32 Llama of so many layers, and nothing is scaled.

A record a mode, number of sources and kind of holders, with each request's time to its first token in
`seconds`, `limit_s` what a whole copy over one link and one prefill take, `tokens_per_s` every `step_s`,
`first_live_s` the first token of nodes on which the model was arriving, `transfer_s` a copy over one link:
hypercast             serving while the model arrives, by whatever planner the gateway chooses
stop-the-world        a binomial pipeline; who has all of the model serves
faasnet               a binary tree, in the same way
nccl                  a group set-up of 300 ms, then a ring, in the same way
gloo                  the time that gloo's broadcast takes on these links, then all serve
serverlessllm-ssd     no cast: each node loads from its own disk at 5 GB/s, also who holds it in host memory
serverlessllm-memory  no cast: nodes load from their own host memory
blitzscale            a chain, and ZigZag of overloaded nodes and those that load
serverlessllm-mixed (not by default): holders from host memory, others from their own disks
turned, half-turned, unturned (not by default): hypercast with k-way reordering on, by halves, off

  sudo python -m benchmarks.scaleout --holders host,gpu --sources 1,2,4 --json s.json --plot s.png
  sudo python -m benchmarks.scaleout --holders mixed --sources 2,4 --modes hypercast,stop-the-world
  sudo python -m benchmarks.scaleout --sources 8 --modes hypercast,serverlessllm-memory
  sudo python -m benchmarks.scaleout --holders gpu --sources 4 --modes turned,half-turned,unturned
  sudo python -m benchmarks.scaleout --real 5 --nodes 6 --sources 2 --requests 40 --prompt-tokens 24 \\
       --output-tokens 24 --modes hypercast,stop-the-world
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

from benchmarks.arguments import at_least, listed, parser_of, rate, say
from benchmarks.crew import CrewError
from benchmarks.endings import Rows, keep_rows
from benchmarks.machine import describe_machine
from benchmarks.multicast_run import WrongBytes
from benchmarks.owner import own_folder
from benchmarks.scaleout_cluster import Came, Scaleout, ScaleoutError, Scene
from benchmarks.scaleout_gloo import broadcast_s
from benchmarks.scaleout_modes import COMPARED, EMULATED_ONLY, MODES, Mode
from benchmarks.scaleout_plot import plot
from benchmarks.scaleout_predicted import stairs
from benchmarks.scaleout_records import Run, arrivals, compare, record_of, requests_of, show
from benchmarks.scaleout_scenes import TIMEOUT_S, link_bytes_s, scenes, somebody_starts, transfer_s
from benchmarks.testbed import Testbed, TestbedError
from benchmarks.testbed_plan import LinkShape
from cli.errors import CliError
from invoker.emulated.profiles import PROFILES, Batch, UnknownProfile, find_profile
from registry.errors import RegistryError

HOLDERS = ("gpu", "host", "mixed")


def measure(args: argparse.Namespace, into: Rows) -> None:
    """Each scene with all modes in turns; `into` has what is finished."""
    common = describe_machine("benchmarks.scaleout")
    shape = LinkShape(rate_bytes_s=int(link_bytes_s(args) / args.slower), bands=True)
    with own_folder(Path(tempfile.gettempdir())) as folder:
        made = scenes(args, folder)
        for number, scene in enumerate(made, 1):
            say(f"scene {number} of {len(made)}: k = {scene.sources} in {scene.holders} memory")
            runs: dict[str, list[Run]] = {name: [] for name in args.modes}
            rows = []
            try:
                with Testbed(args.nodes + 1, shape) as testbed:
                    take_turns(testbed, scene, args, folder, runs)
            finally:
                for name in (name for name in args.modes if runs[name]):
                    params = {**params_of(args, scene, MODES[name]), **common}
                    rows.append(record_of(name, runs[name], limits_of(args, scene), params))
                    print(show(rows[-1]), flush=True)
                into.extend(rows)
                for line in compare(rows):
                    print(line, flush=True)


def take_turns(
    testbed: Testbed,
    scene: Scene,
    args: argparse.Namespace,
    folder: Path,
    runs: dict[str, list[Run]],
) -> None:
    """All modes one after the other, as often as is asked for. Raises what run_mode does, and ValueError."""
    for turn in range(args.repeat):
        for name in args.modes:
            began_s = time.monotonic()
            say(f"turn {turn + 1} of {args.repeat}: {name}")
            came = run_mode(testbed, MODES[name], scene, folder, args.keep_logs)
            runs[name].append(run_of(args, scene, came))
            say(f"  {name} took {time.monotonic() - began_s:.0f} s")


def run_mode(testbed: Testbed, mode: Mode, scene: Scene, parent: Path, keep_logs: Path | None) -> Came:
    """One burst on a fresh platform. Raises ScaleoutError, CrewError."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=parent)))
        wait_s = wait_of(testbed, mode, scene, folder)
        if keep_logs is not None:
            kept = keep_logs / f"{mode.name}-{scene.holders}-{scene.sources}"
            stack.callback(shutil.copytree, folder / "data" / "logs", kept, dirs_exist_ok=True)
        return stack.enter_context(Scaleout(testbed, folder / "data", mode, scene, wait_s)).burst()


def run_of(args: argparse.Namespace, scene: Scene, came: Came) -> Run:
    """What came, in the model's time. Raises ValueError for a request that failed."""
    requests = requests_of(came.answers, args.slower)
    if args.real:
        return Run(requests=requests, seen=came.seen)
    found = stairs(args.profile, scene.burst, came.seen, arrivals(requests))
    return Run(requests=requests, seen=came.seen, stairs=found)


def wait_of(testbed: Testbed, mode: Mode, scene: Scene, folder: Path) -> float:
    """How long nodes that do not hold the model wait before it comes. Raises CrewError."""
    targets = scene.nodes - scene.sources
    if not mode.gloo or not targets:
        return mode.setup_s * scene.slower
    took_s = broadcast_s(testbed, folder, targets, scene.bundle.image_bytes, TIMEOUT_S)
    say(f"  gloo's broadcast to {targets} took {took_s:.2f} s")
    return max(0.0, took_s - scene.own_copy_s)


def limits_of(args: argparse.Namespace, scene: Scene) -> dict[str, float]:
    """A copy over one link; and that with one prompt, of a profile that says what this takes."""
    moved_s = transfer_s(args, scene.bundle)
    prefill_s = 0.0 if args.real else args.profile.step_s(Batch(tokens=args.prompt_tokens, sequences=1))
    return {"transfer_s": moved_s, "limit_s": moved_s + prefill_s}


def params_of(args: argparse.Namespace, scene: Scene, mode: Mode) -> dict[str, Any]:
    links = {} if args.real else asdict(args.profile.links)
    return {
        "emulated": "" if args.real else str(args.profile),
        "model": scene.bundle.architecture,
        "image_bytes": scene.bundle.image_bytes,
        "slower": args.slower,
        "nodes": scene.nodes,
        "sources": scene.sources,
        "holders": scene.holders,
        "requests": args.requests,
        "prompt_tokens": args.prompt_tokens,
        "output_tokens": args.output_tokens,
        "ssd_bytes_s": links.get("disk"),
        "host_to_gpu_bytes_s": links.get("host"),
        "link_bytes_s": links.get("network", args.rate),
        "repeat": args.repeat,
        "says": mode.says,
        "planner": mode.planner,
        "setup_s": mode.setup_s,
        "live": mode.live,
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of("benchmarks.scaleout", __doc__)
    add = parser.add_argument
    add("--emulated", default="h800-llama2-13b/1000", metavar="PROFILE", help=f"of {', '.join(PROFILES)}")
    add("--slower", type=at_least(1), default=10, help="times that devices and links are (default 10)")
    add("--real", type=at_least(2), metavar="LAYERS", help="compute on the processor; of about 51 MB each")
    add("--rate", type=rate, default="200mbit", help="of each link, with --real (default 200mbit)")
    add("--nodes", type=at_least(2), default=8, help="with the sources (default 8)")
    add("--sources", type=listed(at_least(1)), default="1", help="nodes that hold the model, as in 1,2,4")
    add(
        "--holders",
        type=listed(str, HOLDERS),
        default="host",
        help="where they hold it, as in gpu,host; mixed: the first half of them serve already",
    )
    add("--requests", type=at_least(1), default=50, help="at once (default 50)")
    add("--prompt-tokens", type=at_least(1), default=512)
    add("--output-tokens", type=at_least(2), default=128)
    add("--modes", type=listed(str, tuple(MODES)), help=f"default {','.join(COMPARED)}")
    add("--repeat", type=at_least(1), default=1, help="turns (default 1)")
    add("--keep-logs", type=Path, help="copy the platforms' logs to this folder")
    add("--json", type=Path, help="write the records to this file")
    add("--plot", type=Path, help="write a PNG to this file")
    args = parser.parse_args(arguments)
    try:
        args.profile = find_profile(args.emulated)
    except UnknownProfile as error:
        parser.error(f"--emulated: {error}")
    if args.real:
        args.slower = 1
    args.modes = args.modes or [name for name in COMPARED if not (args.real and name in EMULATED_ONLY)]
    if args.real and any(name in EMULATED_ONLY for name in args.modes):
        parser.error(f"--real: {', '.join(EMULATED_ONLY)} needs emulated devices")
    if not any(somebody_starts(args.nodes, k, holders) for k in args.sources for holders in args.holders):
        parser.error("no number of sources is below --nodes: nobody would receive anything")
    return args


def main() -> None:
    args = parse()
    keep_rows(
        "scaleout",
        lambda rows: measure(args, rows),
        (TestbedError, ScaleoutError, CrewError, WrongBytes, RegistryError, CliError, OSError, ValueError),
        json=args.json,
        plot=args.plot,
        draw=plot,
    )


if __name__ == "__main__":
    main()
