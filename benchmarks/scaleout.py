"""A burst on a model that few nodes hold: how soon the others serve, by different ways of moving it.

Everything is real but the accelerators, which are emulated (docs/OPERATIONS.md): gateway, control loop,
nodes, image, casts and sockets, each node on a host of its own behind a shaped link (benchmarks/testbed.py;
needs root and iproute2). In each turn every mode gets a fresh platform with k holders of the model, and then
all requests at once. Times are the model's: what was measured, divided by how many times slower the devices
and links are, so that overhead of the platform itself counts for as many times less than it would.

A record a mode, number of sources and kind of holders, with each request's time to its first token in
`seconds`, `limit_s` what a whole copy over one link and one prefill take, `tokens_per_s` every `step_s`:
hypercast             serving while the model arrives, by whatever planner the gateway chooses
stop-the-world        a binomial pipeline; who has all of the model serves
faasnet               a binary tree, in the same way
nccl                  a group set-up of 300 ms, then a finely sliced ring, in the same way
serverlessllm-ssd     no cast: nodes load from their own disks at 5 GB/s, holders from host memory
serverlessllm-memory  no cast: nodes load from their own host memory
blitzscale            a chain, so far without its cooperation of source and target

  sudo python -m benchmarks.scaleout --holders host,gpu --sources 1,2,4 --json s.json --plot s.png
  sudo python -m benchmarks.scaleout --modes faasnet,nccl --nodes 4 --requests 20 --repeat 3
"""

import argparse
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.arguments import at_least, listed, parser_of, say
from benchmarks.machine import describe_machine, write_records
from benchmarks.owner import own_folder
from benchmarks.scaleout_client import Burst
from benchmarks.scaleout_cluster import FUNCTION, Scaleout, ScaleoutError, Scene
from benchmarks.scaleout_modes import MODES, Mode
from benchmarks.scaleout_records import Request, plot, record_of, requests_of, show
from benchmarks.testbed import Testbed, TestbedError
from benchmarks.testbed_plan import LinkShape
from cli.bundle import bundle_model
from cli.errors import CliError
from invoker.emulated.profiles import PROFILES, Batch, Profile, UnknownProfile, find_profile
from registry.emulation import EmulatedDevice, EmulatedModel
from registry.errors import RegistryError

HOLDERS = ("gpu", "host")


def scenes(args: argparse.Namespace) -> list[Scene]:
    """One for each kind and number of holders."""
    model = EmulatedModel(name=args.emulated.partition("-")[2].partition("/")[0], scale=args.profile.scale)
    device = EmulatedDevice(
        name=args.emulated.partition("-")[0],
        count=args.profile.gpus,
        scale=args.profile.scale,
        slower=args.slower,
    )
    bundle = bundle_model(str(model), "auto", "", None)
    burst = Burst(
        model=FUNCTION,
        architecture=str(model),
        requests=args.requests,
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
        timeout_s=600.0,
    )
    return [
        Scene(device=device, bundle=bundle, nodes=args.nodes, sources=sources, holders=holders, burst=burst)
        for holders in args.holders
        for sources in args.sources
        if sources < args.nodes
    ]


def measure(args: argparse.Namespace, into: list[dict[str, Any]]) -> None:
    """Each scene with all modes in turns; `into` has what is finished."""
    common = describe_machine("benchmarks.scaleout")
    rate = int(args.profile.network_bytes_per_s / args.slower)
    for scene in scenes(args):
        runs: dict[str, list[list[Request]]] = {name: [] for name in args.modes}
        try:
            with Testbed(args.nodes + 1, LinkShape(rate_bytes_s=rate)) as testbed:
                take_turns(testbed, scene, args, runs)
        finally:
            for name in (name for name in args.modes if runs[name]):
                params = {**params_of(args, scene, MODES[name]), **common}
                into.append(record_of(name, runs[name], limit_of(args), params))
                print(show(into[-1]), flush=True)


def take_turns(
    testbed: Testbed, scene: Scene, args: argparse.Namespace, runs: dict[str, list[list[Request]]]
) -> None:
    """All modes one after the other, as often as is asked for. Raises ScaleoutError, ValueError."""
    for turn in range(args.repeat):
        for name in args.modes:
            say(f"{scene.holders} k={scene.sources} turn {turn}: {name}")
            answers = run_mode(testbed, MODES[name], scene, args.keep_logs)
            runs[name].append(requests_of(answers, args.slower))


def run_mode(testbed: Testbed, mode: Mode, scene: Scene, keep_logs: Path | None) -> list[dict[str, Any]]:
    """One burst on a fresh platform. Raises ScaleoutError."""
    with ExitStack() as stack:
        folder = stack.enter_context(own_folder(Path(tempfile.gettempdir())))
        if keep_logs is not None:
            kept = keep_logs / f"{mode.name}-{scene.holders}-{scene.sources}"
            stack.callback(shutil.copytree, folder / "data" / "logs", kept, dirs_exist_ok=True)
        return stack.enter_context(Scaleout(testbed, folder / "data", mode, scene)).burst()


def limit_of(args: argparse.Namespace) -> float:
    """A whole copy over one link, and one prompt."""
    profile: Profile = args.profile
    prefill_s = profile.step_s(Batch(tokens=args.prompt_tokens, sequences=1))
    return profile.image_bytes / profile.network_bytes_per_s + prefill_s


def params_of(args: argparse.Namespace, scene: Scene, mode: Mode) -> dict[str, Any]:
    links = asdict(args.profile.links)
    return {
        "emulated": str(args.profile),
        "slower": args.slower,
        "nodes": scene.nodes,
        "sources": scene.sources,
        "holders": scene.holders,
        "requests": args.requests,
        "prompt_tokens": args.prompt_tokens,
        "output_tokens": args.output_tokens,
        "ssd_bytes_s": links["disk"],
        "host_to_gpu_bytes_s": links["host"],
        "link_bytes_s": links["network"],
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
    add("--nodes", type=at_least(2), default=8, help="with the sources (default 8)")
    add("--sources", type=listed(at_least(1)), default="1", help="nodes that hold the model, as in 1,2,4")
    add("--holders", type=listed(str, HOLDERS), default="host", help="where they hold it, as in gpu,host")
    add("--requests", type=at_least(1), default=50, help="at once (default 50)")
    add("--prompt-tokens", type=at_least(1), default=512)
    add("--output-tokens", type=at_least(2), default=128)
    add("--modes", type=listed(str, tuple(MODES)), default=",".join(MODES), help="default %(default)s")
    add("--repeat", type=at_least(1), default=1, help="turns (default 1)")
    add("--keep-logs", type=Path, help="copy the platforms' logs to this folder")
    add("--json", type=Path, help="write the records to this file")
    add("--plot", type=Path, help="write a PNG to this file")
    args = parser.parse_args(arguments)
    try:
        args.profile = find_profile(args.emulated)
    except UnknownProfile as error:
        parser.error(f"--emulated: {error}")
    if not any(sources < args.nodes for sources in args.sources):
        parser.error("no number of sources is below --nodes: nobody would receive anything")
    return args


def main() -> None:
    args = parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that all is cleaned up then, too
    rows: list[dict[str, Any]] = []
    failure = ""
    try:
        measure(args, rows)
    except (TestbedError, ScaleoutError, RegistryError, CliError, OSError, ValueError) as error:
        failure = f"scaleout: {error}"
    except KeyboardInterrupt:
        failure = "scaleout: interrupted"
    if args.json and rows:
        write_records(args.json, rows)
    if args.plot and rows:
        plot(rows, args.plot)
    if failure:
        print(failure, file=sys.stderr)
        sys.exit(130 if failure.endswith("interrupted") else 1)


if __name__ == "__main__":
    main()
