"""Scenarios of scaleout from its command line."""

import argparse
import json
from pathlib import Path

from benchmarks.harness.processes import ROOT
from benchmarks.harness.random_llama import write_random_llama
from benchmarks.scaleout.client import Burst
from benchmarks.scaleout.cluster import FUNCTION, BurstScenario
from cli.upload.bundle import Bundle, bundle_model
from registry.config.emulation import EmulatedDevice, EmulatedModel

TOKENIZER = ROOT / "functions" / "tiny-coder" / "model"
TIMEOUT_S = 600.0


def scenarios(args: argparse.Namespace, folder: Path) -> list[BurstScenario]:
    """Return a scenario per kind and number of holders; a needed checkpoint is written to `folder`."""
    device: EmulatedDevice | None = None
    if args.real:
        write_random_llama(folder / "checkpoint", TOKENIZER, args.real)
        vocabulary = int(json.loads((folder / "checkpoint" / "config.json").read_text())["vocab_size"])
        bundle, emulated = bundle_model(str(folder / "checkpoint"), "auto", "float32", None), ""
    else:
        name, _, model = args.emulated.partition("/")[0].partition("-")
        scale, vocabulary = args.profile.scale, args.profile.model.vocabulary
        emulated = str(EmulatedModel(name=model, scale=scale))
        device = EmulatedDevice(name=name, count=args.profile.gpus, scale=scale, slower=args.slower)
        bundle = bundle_model(emulated, "auto", "", None)
    burst = Burst(
        model=FUNCTION,
        emulated=emulated,
        vocabulary=vocabulary,
        requests=args.requests,
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
        timeout_s=TIMEOUT_S,
    )
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
    return float(args.rate) if args.real else float(args.profile.network_bytes_per_s)


def transfer_s(args: argparse.Namespace, bundle: Bundle) -> float:
    """Return the seconds of a whole copy over one link, in model time."""
    return bundle.image_bytes / link_bytes_s(args)
