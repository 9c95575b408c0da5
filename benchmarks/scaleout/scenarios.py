"""Scenarios of scaleout from its command line."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.arguments import at_least
from benchmarks.harness.processes import ROOT
from benchmarks.harness.random_llama import write_random_llama
from benchmarks.harness.records import chosen
from benchmarks.scaleout.client import Burst
from benchmarks.scaleout.cluster import FUNCTION, BurstScenario
from benchmarks.scaleout.profiles import PROFILES, find_profile, network_bytes_per_s
from cli.upload.bundle import Bundle, bundle_model
from invoker.emulated.profiles import UnknownProfile
from registry.config.emulation import EmulatedDevice, EmulatedModel

TOKENIZER = ROOT / "functions" / "tiny-coder" / "model"
TIMEOUT_S = 600.0


def add_emulated(parser: argparse.ArgumentParser, *, slower: int) -> None:
    """Add the options of emulated devices, and of requests to their models."""
    add = parser.add_argument
    profiles = f"one of {', '.join(PROFILES)}, optionally /SCALE"
    add("--emulated", default="h800-llama2-13b/1000", metavar="PROFILE", help=profiles)
    add("--slower", type=at_least(1), default=slower, help="slow devices and links down by this factor")


def parse_emulated(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options, with the profile of --emulated."""
    args = parser.parse_args(arguments)
    try:
        args.profile = find_profile(args.emulated)
    except UnknownProfile as error:
        parser.error(f"--emulated: {error}")
    return args


def emulated_model(args: argparse.Namespace, variant: int = 0) -> str:
    """Return the architecture of --emulated."""
    name = args.emulated.partition("/")[0].partition("-")[2]
    return str(EmulatedModel(name=name, scale=args.profile.scale, variant=variant))


def emulated_device(args: argparse.Namespace) -> EmulatedDevice:
    """Return the device of --emulated, slowed down."""
    name, profile = args.emulated.partition("-")[0], args.profile
    return EmulatedDevice(name=name, count=profile.gpus, scale=profile.scale, slower=args.slower)


def burst_of(args: argparse.Namespace, emulated: str, vocabulary: int, timeout_s: float) -> Burst:
    """Return the requests of the options."""
    sizes = chosen(args, "requests", "prompt_tokens", "output_tokens")
    return Burst(model=FUNCTION, emulated=emulated, vocabulary=vocabulary, timeout_s=timeout_s, **sizes)


def scenarios(args: argparse.Namespace, folder: Path) -> list[BurstScenario]:
    """Return a scenario per kind and number of holders; a needed checkpoint is written to `folder`."""
    device: EmulatedDevice | None = None
    if args.real:
        write_random_llama(folder / "checkpoint", TOKENIZER, args.real)
        vocabulary = int(json.loads((folder / "checkpoint" / "config.json").read_text())["vocab_size"])
        bundle, emulated = bundle_model(str(folder / "checkpoint"), "auto", "float32", None), ""
    else:
        device, emulated, vocabulary = (
            emulated_device(args),
            emulated_model(args),
            args.profile.model.vocabulary,
        )
        bundle = bundle_model(emulated, "auto", "", None)
    burst = burst_of(args, emulated, vocabulary, TIMEOUT_S)
    return [
        BurstScenario(
            device=device, bundle=bundle, nodes=args.nodes, sources=sources, holders=holders, burst=burst
        )
        for holders in args.holders
        for sources in args.sources
        if has_targets(args.nodes, sources, holders)
    ]


def has_targets(nodes: int, sources: int, holders: str) -> bool:
    """Return whether a node without a serving instance exists; from host memory all nodes may start."""
    if holders == "mixed":
        return 2 <= sources <= nodes
    return sources < nodes or (sources == nodes and holders == "host")


def link_bytes_s(args: argparse.Namespace) -> float:
    """Return a link's rate in model time."""
    return float(args.rate) if args.real else network_bytes_per_s(args.profile)


def transfer_s(args: argparse.Namespace, bundle: Bundle) -> float:
    """Return the seconds of a whole copy over one link, in model time."""
    return bundle.image_bytes / link_bytes_s(args)
